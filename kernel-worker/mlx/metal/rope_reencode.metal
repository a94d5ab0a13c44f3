// keys [heads, tokens, head_dim], already rotated to old_positions [tokens] -> rotated, as if to new_positions.
// turns [pairs]: turns per position of each pair, as a fraction of 2^64. sizes: head_dim, tokens, pairs.
// One thread per element: items [head_dim, tokens, heads]. Elements from 2 pairs on are copied.
//
// The angle is computed in whole numbers, which wrap around with the turn: an f32 product of a position and a
// frequency is off by 0.004 at position 100000, this by the rounding of one angle between -pi and pi.
constexpr float RADIANS = 1.4629180792671596e-9f;  // 2 pi / 2^32
uint element = thread_position_in_grid.x;
uint token = thread_position_in_grid.y;
uint head = thread_position_in_grid.z;
uint head_dim = sizes[0];
uint pairs = sizes[2];
uint row = (head * sizes[1] + token) * head_dim;
if (element >= 2u * pairs) {
  rotated[row + element] = keys[row + element];
  return;
}
uint pair = HALF_SPLIT ? element % pairs : element / 2u;
bool is_second = HALF_SPLIT ? element >= pairs : element % 2u == 1u;
uint distance = HALF_SPLIT ? pairs : 1u;
uint partner = is_second ? element - distance : element + distance;

int moved = int(new_positions[token] - old_positions[token]);
uint64_t phase = uint64_t(int64_t(moved)) * turns[pair];
float angle = float(int(uint(phase >> 32))) * RADIANS;
float cosine = cos(angle);
float sine = sin(angle);
float own = float(keys[row + element]);
float other = float(keys[row + partner]);
rotated[row + element] = T(is_second ? other * sine + own * cosine : own * cosine - other * sine);
