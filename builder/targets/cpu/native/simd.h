// Eight floats at a time through the compiler's vector extensions, which gcc and clang share.
#pragma once
#include <stdint.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));

inline v8 load8(const float* p) { return *reinterpret_cast<const v8*>(p); }
inline void store8(float* p, v8 x) { *reinterpret_cast<v8*>(p) = x; }
inline v8 splat8(float x) { return v8{x, x, x, x, x, x, x, x}; }
inline float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
inline v8 max8(v8 a, v8 b) { return a > b ? a : b; }
inline v8 min8(v8 a, v8 b) { return a < b ? a : b; }

// e^x with a relative error below 3e-7 for x in [-87, 88]; x outside is taken to the nearer end (e^-87 is 1.6e-38).
// x = n·ln2 + r with |r| <= ln2 / 2: e^r by its Taylor polynomial of degree 7, times 2^n through the exponent bits.
inline v8 exp8(v8 x) {
  x = min8(max8(x, splat8(-87.0f)), splat8(88.0f));
  const v8 magic = splat8(12582912.0f);  // 1.5·2^23: adding and subtracting it rounds to an integer
  const v8 n = (x * splat8(1.44269504f) + magic) - magic;
  const v8 r = (x - n * splat8(0.693359375f)) + n * splat8(2.12194440e-4f);  // ln2 in two parts, the first exact
  v8 p = splat8(1.0f / 5040);
  p = p * r + splat8(1.0f / 720);
  p = p * r + splat8(1.0f / 120);
  p = p * r + splat8(1.0f / 24);
  p = p * r + splat8(1.0f / 6);
  p = p * r + splat8(0.5f);
  p = p * r + splat8(1.0f);
  p = p * r + splat8(1.0f);
  const v8i bits = (__builtin_convertvector(n, v8i) + 127) << 23;
  v8 power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float exp1(float x) { return exp8(splat8(x))[0]; }

// tanh through e^2x; the absolute error is below 2e-7.
inline v8 tanh8(v8 x) { return splat8(1.0f) - splat8(2.0f) / (exp8(x + x) + splat8(1.0f)); }
