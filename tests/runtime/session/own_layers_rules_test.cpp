// What a user's own layers may be and do, and what a session says where they may not.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "runtime/device/device_memory.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"
#include "tests/runtime/session/small_layers.h"

namespace tierflow::testing {
namespace {

template <class Middle, class Last = Loss>
Layers layers(const std::string& name = "middle") {
  return Layers()
      .add("table", [] { return std::make_shared<Table>(); })
      .add(name, [] { return std::make_shared<Middle>(); })
      .add("head", [] { return std::make_shared<Last>(); });
}

template <class Middle, class Last = Loss>
std::unique_ptr<Session> session_of() {
  return std::make_unique<Session>(layers<Middle, Last>().build(9), resident(2), AdamW{.lr = 1e-2});
}

void expect_usage(std::initializer_list<std::string_view> words, const std::function<void()>& action) {
  expect_refusal(io::ErrorKind::usage, words, action);
}

struct HalfFrozen : Product {
  HalfFrozen() { product->weight.requires_grad_(false); }
};

TEST(OwnLayerRules, AParameterThatAsksForNoGradientIsNotTrained) {
  const auto session = session_of<HalfFrozen>();
  const auto frozen = session->master("middle.product.weight"), trained = session->master("middle.product.bias");
  for (int step = 0; step < 2; ++step) session->step(batches(2, step));
  EXPECT_EQ(session->master("middle.product.weight"), frozen);
  EXPECT_NE(session->master("middle.product.bias"), trained);
}

struct WithBuffers : Product {
  WithBuffers() {
    register_buffer("numbers", torch::arange(1000));
    register_buffer("third", torch::full({1}, 1.0 / 3, torch::kFloat64));
  }
  Carry forward(const Carry& carry, const Shared& shared) override {
    EXPECT_EQ(named_buffers()["numbers"][999].item<std::int64_t>(), 999);
    EXPECT_EQ(named_buffers()["third"].item<double>(), 1.0 / 3);
    EXPECT_EQ(product->weight.scalar_type(), torch::kBFloat16);
    return Product::forward(carry, shared);
  }
};

TEST(OwnLayerRules, BuffersKeepTheirTypes) {
  session_of<WithBuffers>()->step(batches(2, 0));
}

// So much works.
std::uint64_t least_device_memory(const Model& model) {
  const SessionOptions options = least_device(resident(2), model);
  Session(model, options).step(batches(2, 0));
  return options.device_memory;
}

TEST(OwnLayerRules, APlanHasRoomForBuffersOnce) {
  const auto repeated = [](const LayerFactory& middle) {
    return Layers()
        .add("table", [] { return std::make_shared<Table>(); })
        .repeat(3, "middle", middle)
        .add("head", [] { return std::make_shared<Loss>(); })
        .build(9);
  };
  const std::uint64_t without = least_device_memory(repeated([] { return std::make_shared<Product>(); }));
  const std::uint64_t with = least_device_memory(repeated([] { return std::make_shared<WithTable>(); }));
  EXPECT_GE(with, without + kTableBytes);
  EXPECT_LT(with, without + kTableBytes + kMiB);
}

struct WideLoss : Loss {
  WideLoss() { register_parameter("unused", torch::zeros({1 << 20}), false); }
};

// Of a layer that its factory made for its weights nothing stays, and the host budget has room for it.
TEST(OwnLayerRules, ALayerInFp32IsHeldWhileItIsReadAlone) {
  constexpr std::uint64_t kLayer = 4 << 20;
  const Folder folder;
  const Model model = layers<Product, WideLoss>().build(9);
  const std::uint64_t before = DeviceMemory::install().stats().used;
  const auto session = std::make_unique<Session>(model, resident(2));
  EXPECT_LT(DeviceMemory::install().stats().used, before + kLayer / 2);
  expect_usage({"host"}, [&] {
    SessionOptions options = streamed(resident(2), folder);
    options.device_memory += 4 * kLayer;
    options.host_memory += kLayer / 2;
    Session(model, options);
  });
}

struct WithInteger : Product {
  WithInteger() { register_parameter("count", torch::ones({3}, torch::kLong), false); }
};
struct Twice : Product {
  Twice() { register_module("again", product.ptr()); }
};
struct Counting : Product {
  torch::Tensor calls = register_buffer("calls", torch::zeros({1}));
  Carry forward(const Carry& carry, const Shared& shared) override {
    calls.add_(1);
    return Product::forward(carry, shared);
  }
};
struct Growing : Layer {
  static inline std::atomic<int> made = 0;
  torch::nn::Linear product = register_module("product", torch::nn::Linear(kWidth, ++made % 2 == 0 ? 64 : kWidth));
  Carry forward(const Carry& carry, const Shared&) override { return carry; }
};

TEST(OwnLayerRules, WhatALayerCannotBeIsSaidByName) {
  expect_usage({"count of layer middle", "Long", "make it a buffer"}, [] { layers<WithInteger>().build(); });
  expect_usage({"layer middle", "product.weight and again.weight"}, [] { layers<Twice>().build(); });
  expect_usage({"layer middle", "a buffer that forward() changes"}, [] { session_of<Counting>(); });
  expect_usage({"layer middle", "other parameters", "repeat()"}, [] { session_of<Growing>(); });
  expect_usage({"layer 1 has no name"}, [] { layers<Product>("").build(); });
  for (const int count : {0, -1})
    expect_usage({"at least one layer of middle"},
                 [&] { Layers().repeat(count, "middle", [] { return std::make_shared<Product>(); }); });
}

struct Throwing : Product {
  static inline std::atomic<bool> throws = false;
  Carry forward(const Carry& carry, const Shared& shared) override {
    if (throws) throw std::out_of_range("the layer's own");
    return Product::forward(carry, shared);
  }
};

TEST(OwnLayerRules, AfterAnExceptionFromOutsideTheSessionIsNotIntact) {
  {
    const auto session = session_of<Throwing>();
    session->step(batches(2, 0));
    EXPECT_TRUE(session->intact());
    Throwing::throws = true;
    EXPECT_THROW(session->step(batches(2, 1)), std::out_of_range);
    Throwing::throws = false;
    EXPECT_FALSE(session->intact());
  }
  const auto session = session_of<Product>();
  EXPECT_THROW(session->evaluate(batches(2, 0), [](auto&&...) { throw std::out_of_range("the caller's own"); }),
               std::out_of_range);
  EXPECT_FALSE(session->intact());
}

struct Detached : Loss {
  Carry forward(const Carry& carry, const Shared& shared) override {
    return {Loss::forward(carry, shared)[0].detach()};
  }
};

TEST(OwnLayerRules, AStepThatWouldTrainNothingIsRefused) {
  expect_usage({"the last layer's loss has no gradient"}, [] { session_of<Product, Detached>()->step(batches(2, 0)); });
  const auto session = session_of<Product>();
  const auto before = masters_of(*session);
  {
    const c10::InferenceMode inference;
    expect_usage({"InferenceMode"}, [&] { session->step(batches(2, 0)); });
  }
  for (const double lr : {static_cast<double>(NAN), static_cast<double>(INFINITY), -1.0})
    expect_usage({"a learning rate is a number, 0 or more"}, [&] { session->step(batches(2, 0), lr); });
  for (const auto& [unit, tensor] : {std::pair{77, 3}, {-1, 0}, {0, 1}, {0, -1}})
    expect_usage({"no tensor"}, [&] { session->master(unit, tensor); });
  auto narrow = batches(2, 0), real = narrow;
  narrow[1].labels = narrow[1].labels.to(torch::kInt);
  real[1].ids = real[1].ids.to(torch::kFloat);
  expect_usage({"micro-batch 1: labels are Long, not Int"}, [&] { session->step(narrow); });
  expect_usage({"micro-batch 1: ids are Long, not Float"}, [&] { session->evaluate(real); });
  EXPECT_TRUE(session->intact());
  EXPECT_EQ(masters_of(*session), before);
}

struct Dropping : Product {
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.3));
  Carry forward(const Carry& carry, const Shared& shared) override {
    return {dropout(Product::forward(carry, shared)[0])};
  }
};

Model of_a_family() {
  return with_adapters(plain_model(cases().front()), {.rank = 4, .alpha = 8, .dropout = 0.3}, 5);
}

// The caller's own random numbers, whatever a session draws between them.
TEST(OwnLayerRules, TheCallersRandomNumbersGoOn) {
  DeviceMemory::install();
  torch::manual_seed(5);
  torch::rand({3});
  const torch::Tensor second = torch::rand({3});
  for (const Model& model : {of_a_family(), layers<Dropping>().build(9)}) {
    Session session(model, resident(2), {.lr = 1e-2});
    torch::manual_seed(5);
    torch::rand({3});
    session.step(batches(2, 0));
    EXPECT_TRUE(torch::equal(torch::rand({3}), second));
  }
}

// A loader that shuffles, say. What a family's layers drop the first time they drop again in the backward.
TEST(RandomNumbers, OfOtherThreadsChangeNoMaskOfAFamily) {
  DeviceMemory::install();
  const auto norms = [](bool beside) {
    Session session(of_a_family(), resident(2), {.lr = 1e-2});
    std::atomic<bool> ends = false;
    std::thread other([&] {
      while (beside && !ends) torch::rand({64});
    });
    std::vector<double> found;
    for (int step = 0; step < 3; ++step) found.push_back(session.step(batches(2, step)).grad_norm);
    ends = true;
    other.join();
    return found;
  };
  EXPECT_EQ(norms(true), norms(false));
}

}  // namespace
}  // namespace tierflow::testing
