"""What models have behind their last layer: one module per kind of output."""
