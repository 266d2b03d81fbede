"""One-sided reads of registered memory: shared memory and TCP here, NIXL (RDMA) on clusters."""
