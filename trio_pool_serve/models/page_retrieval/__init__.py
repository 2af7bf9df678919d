"""Page retrievers: late interaction between a query and images of pages."""
