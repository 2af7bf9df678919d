"""How the models known read images: what is made of their pixels, and where they stand among the tokens."""
