"""An emulator of gfx942 (AMD CDNA 3) machine code, as far as our kernels use it.

It runs the code objects of a bundle, instruction by instruction, on memory in which each byte has an owner:
a load or store outside of a tensor, a store to an input, a read of an output or of LDS that nothing wrote,
and an output element that is written twice or never are errors.  What it does not know, it refuses.

The decoder is tinygrad's, made from AMD's machine-readable ISA.  The meaning of the instructions is written
here, from "AMD Instinct MI300 Instruction Set Architecture Reference Guide" and LLVM's "User Guide for AMDGPU
Backend" (kernel descriptor, initial registers).  Not modelled: time, caches, waits, and hazards.

``memory``: device memory and LDS; ``code``: code objects; ``wave``: registers and operands; ``scalar``,
``vector`` (over ``arithmetic``), ``packed``, ``memory_ops``: instructions; ``machine``: workgroups and launches.
"""
