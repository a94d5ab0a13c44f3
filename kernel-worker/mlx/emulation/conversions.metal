// Every conversion between float and the half-precision types, to compare the emulation's own with another's.
// One thread per element: items [count].
uint index = thread_position_in_grid.x;
to_half[index] = half(floats[index]);
to_bfloat[index] = bfloat(floats[index]);
from_half[index] = float(halves[index]);
from_bfloat[index] = float(bfloats[index]);
