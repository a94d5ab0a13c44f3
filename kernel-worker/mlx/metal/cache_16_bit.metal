// keys, values [kv_heads, capacity, K].
#define KEY(row, element) float(keys[(row) * uint(K) + (element)])
#define VALUE(row, element) float(values[(row) * uint(K) + (element)])
