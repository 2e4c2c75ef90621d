"""Operations on arrays and the kernels behind them. Knows no model."""
