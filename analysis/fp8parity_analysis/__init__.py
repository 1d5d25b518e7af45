"""Judge the two curves: the statistics, the report and the stored data of fp8parity. Never imports torch."""
