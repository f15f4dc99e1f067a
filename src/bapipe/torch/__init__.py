"""Running a plan with PyTorch. Only this package imports torch, and `launch` does without."""

__all__: list[str] = []
