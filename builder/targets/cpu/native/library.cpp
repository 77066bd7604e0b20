// The entry point that onnxruntime looks for: registers all operators in the domain "llmbuild.cpu".
#include "block_embedding.h"
#include "block_linear.h"
#include "gated_activation.h"
#include "moe_experts.h"
#include "op.h"
#include "paged_attention.h"

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  static ort::Op<BlockLinear> block_linear;
  static ort::Op<BlockEmbedding> block_embedding;
  static ort::Op<GatedActivation> gated_activation;
  static ort::Op<PagedAttention<float>> paged_attention;
  static ort::Op<PagedAttention<int8_t>> paged_attention_int8;
  static ort::Op<MoeExperts> moe_experts;
  static ort::Op<BlockMoeExperts> block_moe_experts;
  const ort::CustomOp* ops[] = {&block_linear,    &block_embedding,      &gated_activation, &paged_attention,
                                &paged_attention_int8, &moe_experts,     &block_moe_experts};

  const void* const* table = base->get_api(ort::kApiVersion);
  if (table == nullptr) return nullptr;  // older than any version the engine's manifest allows
  const ort::Api api{table};
  ort::CustomOpDomain* domain = nullptr;
  ort::Status* status = api.create_domain("llmbuild.cpu", &domain);
  for (const ort::CustomOp* op : ops) {
    if (status == nullptr) status = api.domain_add(domain, op);
  }
  return status != nullptr ? status : api.add_domain(options, domain);
}
