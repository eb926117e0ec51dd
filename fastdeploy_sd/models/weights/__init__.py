"""From tensors to packed matrices: sources, storages, a decoder's weights by role, the packer and its cache."""
