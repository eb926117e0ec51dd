"""How bytes of KV blocks cross: TCP, shared memory, CUDA IPC, RDMA."""
