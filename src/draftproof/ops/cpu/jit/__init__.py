"""Code generation for the CPU backend: SIMD and AMX intrinsics, kernel compilation, thread pool."""
