// C entry points of the optimizer for the Python tests (ctypes). 0: done; 1: an argument was refused.
#include <cstdint>
#include <exception>

#include "optim/adamw.h"

using namespace tierflow::optim;

extern "C" {

int optim_encode(const float* values, std::uint8_t* codes, float* absmax, std::size_t n, int is_signed) try {
  encode_moment(values, {MomentFormat::block8, codes, absmax}, n, is_signed != 0);
  return 0;
} catch (const std::exception&) {
  return 1;
}

int optim_decode(std::uint8_t* codes, float* absmax, float* values, std::size_t n, int is_signed) try {
  decode_moment({MomentFormat::block8, codes, absmax}, values, n, is_signed != 0);
  return 0;
} catch (const std::exception&) {
  return 1;
}

void optim_split(const float* master, std::uint16_t* hi, std::uint16_t* lo, std::size_t n) {
  split_master(master, hi, lo, n);
}
void optim_join(const std::uint16_t* hi, const std::uint16_t* lo, float* master, std::size_t n) {
  join_master(hi, lo, master, n);
}

// AdamW on hi/lo with block8 moments, or with fp32 moments where the absmax pointers are null.
int optim_adamw(const std::uint16_t* gradient, std::uint16_t* hi, std::uint16_t* lo, void* m, float* m_absmax, void* v,
                float* v_absmax, std::size_t n, std::int64_t step, float lr, float beta1, float beta2, float eps,
                float weight_decay, float bound) try {
  AdamWParams params;
  params.lr = lr;
  params.beta1 = beta1;
  params.beta2 = beta2;
  params.eps = eps;
  params.weight_decay = weight_decay;
  params.step = step;
  params.update_bound = bound;
  const MomentFormat format = m_absmax == nullptr ? MomentFormat::f32 : MomentFormat::block8;
  const State state{MasterFormat::split, hi, lo, {format, m, m_absmax}, {format, v, v_absmax}};
  adamw_update(params, gradient, state, n);
  return 0;
} catch (const std::exception&) {
  return 1;
}

}  // extern "C"
