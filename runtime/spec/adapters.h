#pragma once
// Low-rank adapters as tensors of a model: y = W x + scale * B(A(x)) for linear layers of the blocks, the head and the
// table of tokens (outer_adapters.h), with W frozen, A [rank, in] and B [out, rank] (Hu et al., LoRA, 2021); and the
// modules that are trained whole beside them. They are trained, stored, streamed and committed as any tensor, and are
// the same as those that PEFT makes of the same configuration.
#include <functional>
#include <string>
#include <vector>

#include "runtime/spec/adapter_config.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// An adapter beside each linear layer and each parameter of experts that `config` names: A uniform in +-1/sqrt(in), B
// zero, unless their first values come from the base; then these stand beside them, frozen. The modules that it saves
// are trained, everything else is frozen. With galore what is trainable stays so, but that a named layer's weight is
// trained through one factor: the other one, on the weight's shorter side, is the projector. Both begin with zeros.
// Throws Exception (kind usage) for numbers out of range, for a name that fits nothing, with the names there are, and
// for modules that cannot be saved.
void add_adapters(ModelSpec& spec, const AdapterConfig& config);

// For a configuration that a user has just typed: throws Exception (kind usage), with the names there are, where a name
// or expression to exclude fits no linear layer of the model, or one with a rank or alpha of its own fits none that has
// adapters. `spec` has the adapters of `config`. To PEFT such names do nothing.
void expect_patterns_fit(const ModelSpec& spec, const AdapterConfig& config);

// Stores the weights of the linear layers of blocks in `format`, and freezes them. Those that add_adapters() made
// trained stay as they are, and the tensors `plain` stay in bf16. Adapters that begin with the base's factors have to
// be added after this call: Exception (kind usage).
void set_base_format(ModelSpec& spec, WeightFormat format, const std::vector<std::string>& plain = {});
// `plain` for an unconverted format: those that the folder does not have in it, as `has` says. Throws Exception (kind
// usage) where that is all of them.
std::vector<std::string> plain_beside(const ModelSpec& spec, WeightFormat format,
                                      const std::function<bool(const std::string& name, WeightFormat format)>& has);

// The module that a tensor belongs to, as transformers names it, if the tensor is a linear layer's weight or, outside
// of blocks, a matrix; else empty. Of an adapter's tensor: its layer's, or the path of the parameter of experts that it
// is for.
std::string linear_module(const TensorSpec& tensor);

// Whether linear layers have [in, out].
bool has_transposed_weights(const ModelSpec& spec);

// Which part of an adapter a tensor is. y = W x + scale * (b(a(x)) - initial_b(initial_a(x))). DoRA then scales y by
// (initial_magnitude + magnitude) / |rows of W + scale * b a|. initial_magnitude [out], fp32, holds the lengths of W's
// rows. magnitude [out] holds what training has added to them, so that small changes are not rounded away.
enum class AdapterPart : std::uint8_t { none, a, b, initial_a, initial_b, magnitude, initial_magnitude };
AdapterPart adapter_part(const TensorSpec& tensor);
bool is_adapter(const TensorSpec& tensor);
// Whether it is a factor of each of some experts: A [experts, rank, in], B [experts, out, rank].
bool is_expert_adapter(const TensorSpec& tensor);
// Whether it is a factor beside the table of tokens: A [vocabulary, rank], B [hidden, rank].
bool is_table_adapter(const TensorSpec& tensor);
// Whether PEFT's folder has its elements in another order: the first dimension last.
bool is_turned_beside_base(const TensorSpec& tensor);

// Throws Exception (kind usage) if adapters begin with more factors of a weight than it has: their rank is above its
// smaller side, or twice their rank where they begin with a gradient's.
void check_first_factors(const ModelSpec& spec);
// Whether nothing but adapters is trained, so that the model without them stays what it is.
bool trains_adapters_alone(const ModelSpec& spec);
// Whether the adapters' first values come from the gradient of the base (of_gradient()).
bool begins_with_gradient(const ModelSpec& spec);
// The steps of each window where weights are trained by projected gradients (AdapterInit::galore); else 0.
std::int64_t window_steps(const ModelSpec& spec);
// Whether what is trained is a folder of adapters beside a base that stays as it is.
bool is_written_beside_base(const ModelSpec& spec);

// The name of a tensor in PEFT's folder, if it is of a model with adapters and belongs there: adapters, and the tensors
// of modules that are trained whole. Else empty. First values have the name of the factor that they are a part of:
// A stands above A0, B left of -B0; and the magnitude there is the sum of both.
std::string name_beside_base(const TensorSpec& tensor);
// The shape of the whole tensor there, but for first values. Of all experts it is A [experts * rank, in], expert after
// expert, and B [out, rank * experts], where neighbouring columns belong to neighbouring experts; A of the table of
// tokens is [rank, vocabulary].
std::vector<std::int64_t> shape_beside_base(const TensorSpec& tensor);

// The name of the head there, of a model whose tied embedding is trained beside adapters: PEFT writes it a second time.
// Else empty.
std::string tied_name_beside_base(const ModelSpec& spec);
// What a tensor that is called `name` there is called where the text model lies within a model of text and other
// things: PEFT loads adapters into that. For others `name`.
std::string name_in_whole_model(const ModelSpec& spec, const std::string& name);
// The configuration there. Of a text model within another it names each module by its path in that.
std::string adapter_config_beside_base(const ModelSpec& spec);

}  // namespace tierflow
