// packed [rows, words] -> codes [rows, columns].
// sizes: columns, words. One thread per code: items [columns, rows].
uint column = thread_position_in_grid.x;
uint row = thread_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
codes[row * columns + column] = uint8_t(packed_code<BITS>(packed, row * words, column));
