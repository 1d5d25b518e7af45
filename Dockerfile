# fp8parity in a container.
#   CPU:   docker build -t fp8parity .
#   CUDA:  docker build -t fp8parity --build-arg TORCH_SPEC='torch==2.13.0' --build-arg TORCH_INDEX=<a CUDA wheel index> .
#   mkdir -p out   # else docker makes it, and it is root's
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" -e HOME=/tmp -e USER=fp8parity -v "$PWD/out:/work/out" \
#       fp8parity run recipes/granularity.yaml --out out/granularity
FROM python:3.11.13-slim-bookworm

# TORCH_INDEX, when given, is where pip finds the torch build for your hardware.
ARG TORCH_SPEC="torch==2.13.0"
ARG TORCH_INDEX=""

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1

# torch.compile needs a C++ compiler at run time.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 fp8parity \
 && install -d -o fp8parity -g fp8parity /work /work/mlflow
WORKDIR /work

COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH_SPEC"
COPY harness harness
COPY analysis analysis
COPY recipes recipes
RUN python -m pip install --constraint constraints.txt ".[train,mlflow,tokenizers]"

USER fp8parity
ENTRYPOINT ["fp8parity"]
CMD ["--help"]
