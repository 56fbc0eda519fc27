#pragma once
// The sums that a stage's backward adds gradients to, one beside each weight, the same shapes; undefined where nobody
// wants one. fp32 in a session (fp64 beside fp64 weights, in tests).
//
// A sum may be *fresh*: its memory holds any bits, and stands for zeros. Whoever reads or changes a fresh sum through
// this class finds zeros there, written at that moment; but a product that comes first overwrites it, so that no pass
// over memory writes zeros that the product would read again. What nobody touched has zeros after zero_untouched().
//
// How a product is added is a rule of the device, the same for every shape and budget:
//   - add_product() of ops.h, where none is given: in row tiles, each product rounded to the type of its operands.
//     The rule of the CPU, and everywhere of single layers (decoder_layer.h), whose contributions are bf16 values.
//   - product_in_fp32(): one whole product, whose fp32 result is never rounded: the sum is the operand that it adds to.
//     The rule of a session on CUDA.
#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <vector>

namespace tierflow {

// sum [m, n] = a^T b for a [tokens, m], b [tokens, n], and where it does not come first, + sum.
enum class Order { first, later };
using ProductRule = std::function<void(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, Order order)>;

class Gradients {
 public:
  // Sums that hold values, and ops.h's rule.
  Gradients() = default;
  Gradients(std::vector<at::Tensor> sums) : sums_(std::move(sums)) {}  // NOLINT(google-explicit-constructor)
  Gradients(std::initializer_list<at::Tensor> sums) : sums_(sums) {}
  explicit Gradients(std::size_t count) : sums_(count) {}
  // fresh: of each sum, or empty if all hold values. rule: null: ops.h's.
  Gradients(std::vector<at::Tensor> sums, std::vector<bool> fresh, ProductRule rule)
      : sums_(std::move(sums)), fresh_(std::move(fresh)), rule_(std::move(rule)) {}
  // One owner: of two, each would take the same sum for fresh.
  Gradients(Gradients&&) = default;
  Gradients& operator=(Gradients&&) = default;

  std::size_t size() const { return sums_.size(); }
  void push_back(at::Tensor sum) { sums_.push_back(std::move(sum)); }
  // Puts another sum, which holds values, in the place of one.
  void set(std::size_t position, at::Tensor sum);

  // Whether the sum at a position is wanted; at position -1 it is not.
  bool wants(int position) const { return position >= 0 && sums_.at(static_cast<std::size_t>(position)).defined(); }
  // The sum, for reading and changing.
  const at::Tensor& operator[](std::size_t position) const;
  const at::Tensor& at(std::size_t position) const { return (*this)[position]; }
  const at::Tensor& back() const { return (*this)[size() - 1]; }
  // All sums.
  const std::vector<at::Tensor>& tensors() const;

  // Adds a^T b to a sum, if it is wanted, by the rule.
  void add_product(int position, const at::Tensor& a, const at::Tensor& b) const;
  // The same for a part of a sum, as operator[] gave it.
  void add_product(const at::Tensor& part, const at::Tensor& a, const at::Tensor& b) const;

  // Nothing is fresh any more.
  void zero_untouched() const { tensors(); }

 private:
  bool fresh(std::size_t position) const { return position < fresh_.size() && fresh_[position]; }

  std::vector<at::Tensor> sums_;
  mutable std::vector<bool> fresh_;  // a sum is written to through a const object, and then is not fresh
  ProductRule rule_;
};

// Whether products of a session on `device` overwrite fresh sums.
bool products_overwrite(at::Device device);
// The sums of a session's pass on `device`, by its rule. fresh: as above; where no product overwrites, `sums` hold
// values already (begin_region()).
Gradients gradients_on(at::Device device, std::vector<at::Tensor> sums, std::vector<bool> fresh);
// Begins a region, fp32 [elements], in which some of the sums lie and which stands for zeros as a whole, what lies
// between them included. overwritten: the sums are fresh, and only what none of them covers is written.
void begin_region(const at::Tensor& region, const std::vector<at::Tensor>& sums, bool overwritten);
// The rule of CUDA: a and b have one type, that of sum or a 16-bit one beside fp32.
void product_in_fp32(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, Order order);

}  // namespace tierflow
