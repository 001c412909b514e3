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

// For the work inside a loop of products: what is called there loses all registers.
#define INLINED __attribute__((always_inline))

namespace lf {

typedef float f16 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32)));
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

// The nearest whole numbers.
inline i16 whole(f16 x) {
#ifdef LEFTFOLD_VNNI
    return i16(_mm512_cvtps_epi32(__m512(x)));
#else
    return to_int(nearest(x));
#endif
}

// 256 · high + low: the product is exact, so that one rounding is what a sum of two operations has.
inline f16 joined(f16 high, f16 low) {
#ifdef LEFTFOLD_VNNI
    return f16(_mm512_fmadd_ps(__m512(high), _mm512_set1_ps(256.0f), __m512(low)));
#else
    return high * splat(256.0f) + low;
#endif
}

// Of a and b, b unless a is larger.
inline f16 max(f16 a, f16 b) {
#ifdef LEFTFOLD_VNNI
    return f16(_mm512_max_ps(__m512(a), __m512(b)));
#else
    return a > b ? a : b;
#endif
}

// 2^y for y in [-125, 126]: a polynomial of degree 6 on the fraction, the exponent added as bits.
inline f16 exp2(f16 y) {
    const f16 magic = splat(12582912.0f), shifted = y + magic, f = y - (shifted - magic);  // n: in the last bits
    f16 p = splat(1.5403530e-4f);
    p = p * f + splat(1.3333558e-3f);
    p = p * f + splat(9.6181291e-3f);
    p = p * f + splat(5.5504109e-2f);
    p = p * f + splat(2.4022651e-1f);
    p = p * f + splat(6.9314718e-1f);
    p = p * f + splat(1.0f);
    return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

// Sixteen lanes as a tree: 16, 8, 4, 2, 1.
template <class V, class T, class Join>
inline T folded(V v, Join&& join) {
    T a[16];
    store(a, v);
    for (int width = 8; width; width >>= 1)
        for (int i = 0; i < width; i++) a[i] = join(a[i], a[i + width]);
    return a[0];
}

#ifdef LEFTFOLD_VNNI
// The four bytes at p in every lane of 32 bits.
inline __m512i four_bytes(const void* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

template <class Wide, class Narrow>
inline float folded(f16 v, Wide&& wide, Narrow&& narrow) {
    const __m256 a = wide(_mm512_castps512_ps256(__m512(v)), _mm512_extractf32x8_ps(__m512(v), 1));
    const __m128 b = narrow(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = narrow(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(narrow(c, _mm_movehdup_ps(c)));
}

inline float sum(f16 v) {
    return folded(v, [](__m256 a, __m256 b) { return a + b; }, [](__m128 a, __m128 b) { return a + b; });
}
inline float largest(f16 v) {
    return folded(v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
                  [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
inline int32_t sum(i16 v) { return _mm512_reduce_add_epi32(__m512i(v)); }
inline int32_t largest(i16 v) { return _mm512_reduce_max_epi32(__m512i(v)); }
#else
inline float sum(f16 v) {
    return folded<f16, float>(v, [](float a, float b) { return a + b; });
}
inline float largest(f16 v) {
    return folded<f16, float>(v, [](float a, float b) { return a > b ? a : b; });
}
inline int32_t sum(i16 v) {
    return folded<i16, int32_t>(v, [](int32_t a, int32_t b) { return a + b; });
}
inline int32_t largest(i16 v) {
    return folded<i16, int32_t>(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
#endif

// Bits of the largest magnitude among n values (n a multiple of 16): at least INFINITE if one is not finite.
const int32_t INFINITE = 0x7f800000;
inline int32_t magnitude_bits(const float* x, int n) {
    i16 most = splat(0);
    for (int k = 0; k < n; k += 16) {
        const i16 bits = load<i16>(x + k) & splat(0x7fffffff);
        most = bits > most ? bits : most;
    }
    return largest(most);
}

// What a row of n values is divided by so that its largest magnitude becomes `most`, and the scale that undoes it.
// Rows of zeros, or so small that the inverse is infinite, become zeros; `finite` is false where a value is not.
struct Scale {
    float inverse, scale;
    bool finite;

    // Sixteen values in whole numbers of it. (0 · infinity is no number, and no whole number either.)
    i16 whole_at(const float* x) const {
        const i16 used = splat(inverse > 0.0f ? -1 : 0);
        return whole(bits_to_float(float_to_bits(load<f16>(x)) & used) * inverse);
    }
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
    for (int k = 0; k < n; k += 16) sink(k, s.whole_at(x + k));
    return s;
}

// Whole numbers of 0 … 65535, at n (a multiple of 16) places, as two bytes each; `whole_at(k)`: sixteen of them.
template <class Whole>
inline void two_bytes(int n, uint8_t* high, uint8_t* low, Whole&& whole_at) {
    int k = 0;
#ifdef LEFTFOLD_VNNI
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (; k + 64 <= n; k += 64) {
        const __m512i a = _mm512_packus_epi32(__m512i(whole_at(k)), __m512i(whole_at(k + 16)));
        const __m512i b = _mm512_packus_epi32(__m512i(whole_at(k + 32)), __m512i(whole_at(k + 48)));
        const __m512i h = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        const __m512i mask = _mm512_set1_epi16(255);
        const __m512i l = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        _mm512_storeu_si512(high + k, _mm512_permutexvar_epi32(order, h));
        _mm512_storeu_si512(low + k, _mm512_permutexvar_epi32(order, l));
    }
#endif
    for (; k < n; k += 16) {
        const i16 u = whole_at(k);
        store(high + k, __builtin_convertvector(u >> 8, u16));
        store(low + k, __builtin_convertvector(u & splat(255), u16));
    }
}

// Sixteen whole numbers as every fourth byte from to[lane] on; the bytes between may be another thread's.
inline void every_fourth(int8_t* to, int lane, i16 q) {
#ifdef LEFTFOLD_VNNI
    _mm512_mask_storeu_epi8(to, 0x1111111111111111ull << lane, __m512i((q & splat(255)) << (8 * lane)));
#else
    for (int i = 0; i < 16; i++) to[4 * i + lane] = int8_t(q[i]);
#endif
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
    y = max(splat(-125.0f), y);
    y = y > splat(126.0f) ? splat(126.0f) : y;
    return (gate / (splat(1.0f) + exp2(y))) * up;
}

}  // namespace lf
