// Functions applied to finished sums before the sums are rounded: bias, then GELU, then the
// residual.
#ifndef IRIS_BODY_EPILOGUE_H
#define IRIS_BODY_EPILOGUE_H

#include "iris/view.h"

namespace iris {

/// Error function erf with an error of about 2e-7: a polynomial in x^2 for |x| below 1, and
/// piecewise polynomials for erfc up to 4. It is written out here because not every kernel compiler
/// provides a math library.
IRIS_DEVICE float erf(float x) {
    const float size = x < 0 ? -x : x;
    float value;
    if (size < 1.0f) {
        const float u = x * x;
        value = -9.667045560e-06f;
        value = value * u + 1.126595962e-04f;
        value = value * u - 8.484080317e-04f;
        value = value * u + 5.221031606e-03f;
        value = value * u - 2.686543018e-02f;
        value = value * u + 1.128378212e-01f;
        value = value * u - 3.761263788e-01f;
        value = value * u + 1.128379226e+00f;
        return x * value;
    }
    if (size < 2.0f) {
        const float t = size - 1.5f;
        value = 4.358006117e-05f;
        value = value * t - 1.540339785e-03f;
        value = value * t + 2.374689560e-03f;
        value = value * t + 4.701123107e-03f;
        value = value * t - 1.932746917e-02f;
        value = value * t + 1.487085037e-02f;
        value = value * t + 4.459891468e-02f;
        value = value * t - 1.387522072e-01f;
        value = value * t + 1.783954352e-01f;
        value = value * t - 1.189302877e-01f;
        value = value * t + 3.389485180e-02f;
    } else if (size < 3.0f) {
        const float t = size - 2.5f;
        value = 2.459379903e-04f;
        value = value * t - 3.063659824e-04f;
        value = value * t - 5.413815961e-04f;
        value = value * t + 2.808239078e-03f;
        value = value * t - 6.117443088e-03f;
        value = value * t + 8.621514775e-03f;
        value = value * t - 8.350086398e-03f;
        value = value * t + 5.445737392e-03f;
        value = value * t - 2.178284340e-03f;
        value = value * t + 4.069518764e-04f;
    } else if (size < 4.0f) {
        const float t = size - 3.5f;
        value = -1.553172660e-05f;
        value = value * t + 3.703946641e-05f;
        value = value * t - 5.815416807e-05f;
        value = value * t + 7.714469393e-05f;
        value = value * t - 8.211951354e-05f;
        value = value * t + 6.777099043e-05f;
        value = value * t - 4.229541082e-05f;
        value = value * t + 1.889633677e-05f;
        value = value * t - 5.399427209e-06f;
        value = value * t + 7.431066251e-07f;
    } else {
        // Values above 4 and NaN take this branch; a NaN must stay NaN.
        value = size * 0.0f;
        if (size > 4.0f && !(value == value)) value = 0.0f;
    }
    return x < 0 ? value - 1.0f : 1.0f - value;
}

IRIS_DEVICE float gelu(float x) { return x * 0.5f * (1.0f + erf(x * 0.70710678f)); }

/// Applies bias and then GELU to `count` elements of this rank's result from column `col` on.
/// Called once per element.
IRIS_DEVICE void finish_values(const OpArgs& args, u32 col, u32 count, Values& values) {
    if (args.bias.address != 0) {
        const Values bias = View::of(args.bias).load(0, col, count);
        IRIS_UNROLL
        for (u32 i = 0; i < WIDTH; ++i) values.v[i] += bias.v[i];
    }
    if (args.epilogue & EPILOGUE_GELU) {
        IRIS_UNROLL
        for (u32 i = 0; i < WIDTH; ++i) values.v[i] = gelu(values.v[i]);
    }
}

/// Adds the residual of `count` elements from (row, col) on, after finish_values, if the op has a
/// residual.
IRIS_DEVICE void add_residual(const OpArgs& args, u32 row, u32 col, u32 count, Values& values) {
    if (args.residual.address == 0) return;
    const Values residual = View::of(args.residual).load(row, col, count);
    IRIS_UNROLL
    for (u32 i = 0; i < WIDTH; ++i) values.v[i] += residual.v[i];
}

} // namespace iris

#endif
