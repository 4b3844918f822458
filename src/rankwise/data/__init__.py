"""Data specifications, splits, images, augmentation, batches."""
