"""The served architectures: reading checkpoints and building decoders from layers/. Knows no scheduling."""
