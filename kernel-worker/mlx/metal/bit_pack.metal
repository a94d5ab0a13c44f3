// codes [rows, columns] -> packed [rows, words], words = ceil(columns BITS / 32).
// sizes: columns, words. One thread per word: items [words, rows].
// A code's bits above BITS are ignored, what a row's last word has left over is 0.
uint word = thread_position_in_grid.x;
uint row = thread_position_in_grid.y;
uint columns = sizes[0];
uint words = sizes[1];
packed[row * words + word] = packed_word<BITS>(codes, row * columns, columns, word);
