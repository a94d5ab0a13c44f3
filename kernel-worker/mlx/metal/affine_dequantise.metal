// packed [rows, words], scales [rows, groups], minimums [rows, groups] -> values [rows, columns].
// sizes: columns, words, groups. One thread per value: items [columns, rows].
// A value is code * scale + minimum. The product of 8 and 11 bits is exact in float, so a compiler that fuses it with
// the addition changes nothing.
uint column = thread_position_in_grid.x;
uint row = thread_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
uint group = row * sizes[2] + column / uint(GROUP);
float code = float(packed_code<BITS>(packed, row * words, column));
values[row * columns + column] = T(code * float(scales[group]) + float(minimums[group]));
