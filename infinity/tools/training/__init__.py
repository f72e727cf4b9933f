"""The fine-tuning program behind `infinity train`. Importing this package does not import torch."""
