"""All cases of the zoo, by name."""

import of_gradients
import of_models
import of_optimizers
import of_parameters
from case import CASES

__all__ = ["CASES", "of_gradients", "of_models", "of_optimizers", "of_parameters"]
