// torch's operators on the simulated GPU: each that has a kernel for CUDA is computed by its kernel for the CPU, on
// views of the same memory. They replace the kernels in torch's dispatcher, so that they hold for every thread, that of
// the backward pass included, and for whatever is built on operators: FSDP, DTensor, checkpointing, autocast.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" void simulated_gpu_synchronize(int device, void* stream);

namespace {

using c10::IValue;
using torch::jit::Stack;

// Those that touch no element, which CUDA's own do as well; and those that are about memory and streams themselves.
const std::set<std::string> LEFT_TO_CUDA = {
    "aten::empty.memory_format", "aten::empty_strided",        "aten::resize_",          "aten::set_",
    "aten::set_.source_Storage", "aten::set_.source_Tensor",   "aten::record_stream",    "aten::_pin_memory",
    "aten::is_pinned",           "aten::_reshape_alias",       "aten::as_strided",       "aten::view",
    "aten::unfold",              "aten::view_as_real",         "aten::view_as_complex",  "aten::is_set_to",
    "aten::set_.source_Storage_storage_offset",
};

// Wait for what the calling thread has queued on a device; every device calls its default stream by the same name.
void wait_for_current_stream(c10::DeviceIndex device) {
  simulated_gpu_synchronize(device, c10::cuda::getCurrentCUDAStream(device).stream());
}

// A tensor for the CPU that lies where a tensor of the GPU lies.
at::Tensor on_cpu(const at::Tensor& tensor) {
  at::TensorOptions options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  std::size_t bytes = tensor.storage().nbytes();
  if (bytes == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* at = tensor.storage().mutable_data();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, at::DataPtr(at, nullptr, [](void*) {}, at::kCPU),
      c10::GetAllocator(at::kCPU), /*resizable=*/true);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

at::Tensor on_gpu(const at::Tensor& tensor, c10::Device device) {
  at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_cpu(made).copy_(tensor);
  return made;
}

// One call of an operator, on its way to the CPU and back.
class Call {
 public:
  IValue down(const IValue& value) {
    if (value.isTensor()) return down(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(down(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        list.push_back(each.has_value() ? std::optional<at::Tensor>(down(*each)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = value.toDevice();
      is_made_on_device_ = true;
      // What is made may come to lie where something that is still under way has lain.
      devices_.insert(device_->has_index() ? device_->index() : c10::cuda::current_device());
      return c10::Device(at::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) generator_ = value.toGenerator();
    return value;
  }

  IValue up(const IValue& value) {
    if (value.isTensor()) return up(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(up(each));
      return list;
    }
    return value;
  }

  // What has another size now was given to be filled, whatever its size.
  void write_back() {
    for (auto& [made, original] : originals_) {
      at::Tensor original_tensor = original.first, cpu = original.second;
      bool is_same = cpu.sizes() == original_tensor.sizes() && cpu.strides() == original_tensor.strides();
      if (is_same && (cpu.numel() == 0 || cpu.data_ptr() == original_tensor.data_ptr())) continue;
      original_tensor.resize_(cpu.sizes());
      original_tensor.as_strided_(cpu.sizes(), cpu.strides());
      on_cpu(original_tensor).copy_(cpu);
    }
  }

  std::optional<c10::Device> device() const { return device_; }
  const std::optional<at::Generator>& generator() const { return generator_; }

  void synchronize() const {
    for (c10::DeviceIndex index : devices_) wait_for_current_stream(index);
  }

 private:
  at::Tensor down(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!device_ || (!is_made_on_device_ && !has_full_ && tensor.dim() > 0)) device_ = tensor.device();
    has_full_ |= tensor.dim() > 0;
    devices_.insert(tensor.device().index());
    at::Tensor made = on_cpu(tensor);
    originals_.emplace(made.unsafeGetTensorImpl(), std::pair(tensor, made));
    return made;
  }

  at::Tensor up(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda() || !device_) return tensor;
    if (auto found = originals_.find(tensor.unsafeGetTensorImpl()); found != originals_.end()) return found->second.first;
    return on_gpu(tensor, *device_);
  }

  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> originals_;
  std::set<c10::DeviceIndex> devices_;
  std::optional<c10::Device> device_;
  bool is_made_on_device_ = false, has_full_ = false;
  std::optional<at::Generator> generator_;
};

// Random numbers follow from the seed and the offset of the GPU's generator, which moves on.
std::uint64_t next_seed(at::Generator generator) {
  auto* gpu = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::scoped_lock lock(gpu->mutex_);
  std::uint64_t offset = gpu->philox_offset_per_thread();
  gpu->set_philox_offset_per_thread(offset + 4);
  std::uint64_t mixed = gpu->current_seed() + 0x9e3779b97f4a7c15ull * (offset / 4 + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return mixed ^ (mixed >> 31);
}

bool is_random(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

void run_seeded(const c10::OperatorHandle& op, Stack& arguments, const Call& call) {
  at::Generator gpu = call.generator() ? *call.generator()
                                       : at::cuda::detail::getDefaultCUDAGenerator(call.device()->index());
  std::uint64_t seed = next_seed(gpu);
  bool is_given = false;
  const auto& declared = op.schema().arguments();
  for (std::size_t index = 0; index < declared.size(); index++) {
    if (declared[index].name() == "generator") {
      arguments[index] = at::detail::createCPUGenerator(seed);
      is_given = true;
    }
  }
  if (is_given) {
    op.callBoxed(arguments);
    return;
  }
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  at::Tensor before = shared.get_state();
  shared.set_current_seed(seed);
  try {
    op.callBoxed(arguments);
  } catch (...) {
    shared.set_state(before);
    throw;
  }
  shared.set_state(before);
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  std::size_t num_arguments = op.schema().arguments().size();
  Call call;
  Stack arguments;
  for (const IValue& value : torch::jit::last(*stack, num_arguments)) arguments.push_back(call.down(value));
  const auto& declared = op.schema().arguments();
  for (std::size_t index = 0; index < declared.size(); index++) {
    if (declared[index].name() == "pin_memory") arguments[index] = IValue();
  }
  call.synchronize();
  c10::OptionalDeviceGuard guard(call.device());
  {
    at::AutoDispatchBelowAutograd below;
    try {
      if (is_random(op) && call.device()) {
        run_seeded(op, arguments, call);
      } else {
        op.callBoxed(arguments);
      }
    } catch (const c10::NotImplementedError& error) {
      std::string why = error.what_without_backtrace();
      C10_THROW_ERROR(
          NotImplementedError, c10::str("the simulated GPU cannot compute ", op.operator_name(), " on the CPU: ",
                                        why.substr(0, why.find(". "))));
    }
    call.write_back();
  }
  torch::jit::drop(*stack, num_arguments);
  for (const IValue& value : arguments) torch::jit::push(*stack, call.up(value));
}

// Plain copies are the runtime's, streams and pinned memory included; those that convert are computed.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool is_plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() && self.is_contiguous() &&
                  source.is_contiguous() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (is_plain) return at::native::copy_(self, source, non_blocking);
  for (const at::Tensor& each : {self, source}) {
    if (each.is_cuda()) wait_for_current_stream(each.device().index());
  }
  at::AutoDispatchBelowAutograd below;
  (self.is_cuda() ? on_cpu(self) : self).copy_(source.is_cuda() ? on_cpu(source) : source);
  return self;
}

// The backward pass of RMSNorm, which has a kernel for GPUs alone: y = w x r with r = 1 / sqrt(mean(x^2) + eps).
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, at::IntArrayRef normalized_shape, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, std::array<bool, 2> wanted) {
  std::int64_t num_dims = static_cast<std::int64_t>(normalized_shape.size());
  std::vector<std::int64_t> inner, outer;
  for (std::int64_t dim = 0; dim < input.dim(); dim++) {
    (dim < input.dim() - num_dims ? outer : inner).push_back(dim);
  }
  at::Tensor scaled = input.to(at::kFloat) * rstd, grad = grad_output.to(at::kFloat), of_input, of_weight;
  at::Tensor weighted = weight.has_value() && weight->defined() ? grad * weight->to(at::kFloat) : grad;
  if (wanted[0]) {
    of_input = (rstd * (weighted - scaled * (weighted * scaled).mean(inner, true))).to(input.scalar_type());
  }
  if (wanted[1] && weight.has_value() && weight->defined()) {
    of_weight = grad * scaled;
    if (!outer.empty()) of_weight = of_weight.sum(outer);
    of_weight = of_weight.to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

bool touches_no_element(const c10::OperatorHandle& op) {
  if (LEFT_TO_CUDA.count(c10::toString(op.operator_name())) != 0) return true;
  for (const auto& returned : op.schema().returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

class Quiet : public c10::WarningHandler {  // about kernels that are replaced, which is what this does
  void process(const c10::Warning&) override {}
};

struct Replaced {
  std::vector<std::unique_ptr<torch::Library>> libraries;

  Replaced() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const c10::OperatorName& name :
         c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
      if (name.getNamespace() != std::string("aten")) continue;
      auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || touches_no_element(*op)) continue;
      std::string local = c10::toString(name).substr(std::strlen("aten::"));
      library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
    }
    library->impl("copy_", torch::CppFunction::makeFromUnboxedFunction(&copy_));
    library->impl("_fused_rms_norm_backward", torch::CppFunction::makeFromUnboxedFunction(&rms_norm_backward));
    libraries.push_back(std::move(library));
    // Attention is left to the math kernel, whose operators are computed; the others are one kernel that a CPU has not.
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
};

Replaced* replaced = new Replaced();  // until the process ends

}  // namespace
