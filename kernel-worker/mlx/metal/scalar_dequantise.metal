// packed [rows, words] of signed codes, scales [rows, groups] -> values [rows, columns], each scale * code.
// sizes: columns, words, groups. One thread per value: items [columns, rows].
constexpr uint SIGN = 1u << (BITS - 1);
uint column = thread_position_in_grid.x;
uint row = thread_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
uint code = packed_code<BITS>(packed, row * words, column);
int signed_code = int(code ^ SIGN) - int(SIGN);
float scale = float(scales[row * sizes[2] + column / uint(GROUP)]);
values[row * columns + column] = T(scale * float(signed_code));
