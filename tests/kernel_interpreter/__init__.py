"""Runs the code that a kernel emits, on a CPU, and reports what would be wrong on a GPU; see README.md here."""

from kernel_interpreter.lanes import Fault as Fault
from kernel_interpreter.machine import Launch as Launch, Machine as Machine
from kernel_interpreter.memory import Allocation as Allocation
from kernel_interpreter.ptx import UnknownInstruction as UnknownInstruction
from kernel_interpreter.translate import Program as Program, compile_kernel as compile_kernel
