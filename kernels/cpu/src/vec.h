// Sixteen floats at a time, and the few functions of them that results depend on.
//
// Every function here is a fixed sequence of IEEE single-precision operations (no fused multiply-add, no
// reassociation), so any compiler and instruction set gives the same bits, and so does ../reference.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && !defined(LEFTFOLD_PORTABLE)
#define LEFTFOLD_VNNI 1
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#define LEFTFOLD_AMX 1
#endif
#endif

namespace lf {

typedef float f16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int8_t b16 __attribute__((vector_size(16)));
typedef uint8_t u16 __attribute__((vector_size(16)));

template <class V, class T>
inline V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline f16 splat(float x) { return f16{} + x; }
inline i16 splat(int32_t x) { return i16{} + x; }
inline f16 to_float(i16 v) { return __builtin_convertvector(v, f16); }
inline f16 bits_to_float(i16 v) { return load<f16>(&v); }
inline i16 float_to_bits(f16 v) { return load<i16>(&v); }

// Round to nearest, ties to even, for |x| < 2^22. The caller's values are in range or not numbers.
inline f16 nearest(f16 x) {
    const f16 magic = splat(12582912.0f);
    return (x + magic) - magic;
}

inline i16 to_int(f16 v) { return __builtin_convertvector(v, i16); }

// 2^y for y in [-125, 126]: a polynomial of degree 6 on the fraction, the exponent added as bits.
inline f16 exp2(f16 y) {
    const f16 n = nearest(y), f = y - n;
    f16 p = splat(1.5403530e-4f);
    p = p * f + splat(1.3333558e-3f);
    p = p * f + splat(9.6181291e-3f);
    p = p * f + splat(5.5504109e-2f);
    p = p * f + splat(2.4022651e-1f);
    p = p * f + splat(6.9314718e-1f);
    p = p * f + splat(1.0f);
    return bits_to_float(float_to_bits(p) + (to_int(n) << 23));
}

// The sum of sixteen lanes as a tree: 16, 8, 4, 2, 1.
inline float sum(f16 v) {
    float a[16];
    store(a, v);
    for (int width = 8; width; width >>= 1)
        for (int i = 0; i < width; i++) a[i] = a[i] + a[i + width];
    return a[0];
}

inline float largest(f16 v) {
    float a[16];
    store(a, v);
    for (int width = 8; width; width >>= 1)
        for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
    return a[0];
}

inline f16 max(f16 a, f16 b) { return a > b ? a : b; }

// Bits of the largest magnitude among n values (n a multiple of 16): at least INFINITE if one is not finite.
const int32_t INFINITE = 0x7f800000;
inline int32_t magnitude_bits(const float* x, int n) {
    i16 most = splat(0);
    for (int k = 0; k < n; k += 16) {
        const i16 bits = load<i16>(x + k) & splat(0x7fffffff);
        most = bits > most ? bits : most;
    }
    int32_t a[16], result = 0;
    store(a, most);
    for (int i = 0; i < 16; i++) result = a[i] > result ? a[i] : result;
    return result;
}

// What a row of n values is divided by so that its largest magnitude becomes `most`, and the scale that undoes it.
// Rows of zeros, or so small that the inverse is infinite, become zeros; `finite` is false where a value is not.
struct Scale {
    float inverse, scale;
    bool finite;
};

inline Scale scale_of(const float* x, int n, float most) {
    const int32_t bits = magnitude_bits(x, n);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float inverse = bits && bits < INFINITE ? most / largest : 0.0f;
    if (inverse == 0.0f || inverse > 3.0e38f) return {0.0f, 0.0f, bits < INFINITE};
    return {inverse, largest / most, true};
}

// Whole numbers of one scale, at n a multiple of 16: `sink(k, sixteen of them)`.
template <class Sink>
inline Scale quantize(const float* x, int n, float most, Sink&& sink) {
    const Scale s = scale_of(x, n, most);
    const i16 used = splat(s.inverse > 0.0f ? -1 : 0);  // 0 · infinity is no number, and no whole number either
    for (int k = 0; k < n; k += 16) sink(k, to_int(nearest(bits_to_float(float_to_bits(load<f16>(x + k)) & used) * s.inverse)));
    return s;
}

// Over the root mean square, times `weight`; n a multiple of 16.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    f16 squares = splat(0.0f);
    for (int k = 0; k < n; k += 16) {
        const f16 v = load<f16>(x + k);
        squares = squares + v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    for (int k = 0; k < n; k += 16) store(out + k, (load<f16>(x + k) * scale) * load<f16>(weight + k));
}

// SiLU(gate) · up.
inline f16 silu_mul(f16 gate, f16 up) {
    f16 y = gate * splat(-1.4426950f);
    y = y < splat(-125.0f) ? splat(-125.0f) : y;
    y = y > splat(126.0f) ? splat(126.0f) : y;
    return (gate / (splat(1.0f) + exp2(y))) * up;
}

}  // namespace lf
