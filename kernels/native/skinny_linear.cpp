// y = x W^T for few rows of x, the shape of decoding and verification; see few_rows.h.
//
// Letters: R rows of x, E rows of W, D width.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "few_rows.h"

namespace {

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
              "x [R, D] and weight [E, D] must share D");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x and weight must be of one dtype");
  const at::Tensor inputs = x.to(at::kFloat).contiguous();
  const at::Tensor weights = weight.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, inputs.options());
  const float* from = inputs.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  if (weight.scalar_type() == at::kBFloat16) {
    paceline::multiply(from, weights.const_data_ptr<c10::BFloat16>(), to, x.size(0), weight.size(0), x.size(1));
    return out.to(at::kBFloat16);
  }
  TORCH_CHECK(weight.scalar_type() == at::kFloat, "float32 or bfloat16 weights");
  paceline::multiply(from, weights.const_data_ptr<float>(), to, x.size(0), weight.size(0), x.size(1));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(paceline, library) { library.def("skinny_linear(Tensor x, Tensor weight) -> Tensor"); }
TORCH_LIBRARY_IMPL(paceline, CPU, library) { library.impl("skinny_linear", &skinny_linear); }
