from paddle.device import cuda as cuda
