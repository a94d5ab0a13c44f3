/* Included before the mlx-c headers when bindings are generated: the half types under their names of Arm. */
#if !defined(__aarch64__)
typedef unsigned short float16_t;
typedef unsigned short bfloat16_t;
#define HAS_FLOAT16
#define HAS_BFLOAT16
#endif
