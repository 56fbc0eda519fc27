#pragma once
// Everything a LibTorch program needs.
//  - a model: load() reads one, Layers makes one of your own modules
//  - data: Dataset, and micro_batch() for a part of it
//  - training: Session; the update alone: AdamW8bit
//  - text: generate(), Talk
//  - preference losses: SessionOptions::loss, row_log_probabilities()
//  - distillation: TeacherFile, add_teacher()
//  - LoRA and GaLore: with_adapters(), for GaLore with AdapterInit::galore
#include <torch/torch.h>

#include "runtime/base/byte_sizes.h"
#include "runtime/base/exception.h"
#include "runtime/batches/data_batches.h"
#include "runtime/batches/teacher_batches.h"
#include "runtime/data/data.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/pair_batch.h"
#include "runtime/optimizer/adamw8bit.h"
#include "runtime/planning/moved_store.h"
#include "runtime/session/generator.h"
#include "runtime/session/layers.h"
#include "runtime/session/session.h"
