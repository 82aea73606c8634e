// torch's operators on the simulated GPU: each that has a kernel for CUDA is computed by its kernel for the CPU, on
// views of the same memory: at once or, where what is queued is late, when somebody waits for it. They replace the kernels in torch's dispatcher, so that they hold for every thread, that of
// the backward pass included, and for whatever is built on operators: FSDP, DTensor, checkpointing, autocast.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" void simulated_gpu_synchronize(int device, void* stream);
extern "C" int simulated_gpu_is_late();
extern "C" void simulated_gpu_enqueue(int device, void* stream, void (*work)(void*), void* argument);

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

void enqueue_on_current_stream(c10::DeviceIndex device, std::function<void()> work) {
  auto* held = new std::function<void()>(std::move(work));
  auto run = [](void* held) {
    std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(held));
    (*own)();
  };
  simulated_gpu_enqueue(device, c10::cuda::getCurrentCUDAStream(device).stream(), run, held);
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

// Put other tensors in the place of those in an argument, if it has any.
template <typename Change>
std::optional<IValue> with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      list.push_back(each.has_value() ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    }
    return list;
  }
  return std::nullopt;
}

// One call of an operator, on its way to the CPU and back.
class Call {
 public:
  IValue down(const IValue& value) {
    if (auto found = with_tensors(value, [&](const at::Tensor& each) { return down(each); })) return *found;
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
    return with_tensors(value, [&](const at::Tensor& each) { return up(each); }).value_or(value);
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
  bool is_of_one_device() const { return devices_.size() == 1; }

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

// A histogram of integers, which CPUs make of numbers with a point alone.
bool counts_integers(const c10::OperatorHandle& op, const IValue& values) {
  return op.operator_name().name == "aten::histc" && at::isIntegralType(values.toTensor().scalar_type(), false);
}

void count_integers(const c10::OperatorHandle& op, Stack& arguments) {
  at::ScalarType type = arguments[0].toTensor().scalar_type();
  arguments[0] = arguments[0].toTensor().to(at::kDouble);
  op.callBoxed(arguments);
  arguments[0] = arguments[0].toTensor().to(type);
}

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

// What an operator returns, learned from tensors without elements: of its arguments' sizes alone.
class Shapes {
 public:
  // Return whether it could be learned, and no argument has another size now.
  bool learn(const c10::OperatorHandle& op, const std::vector<IValue>& given) {
    Stack stack;
    for (const IValue& value : given) stack.push_back(without_elements(value));
    if (!is_known_) return false;
    try {
      at::AutoDispatchBelowAutograd below;
      op.callBoxed(stack);
    } catch (const std::exception&) {
      return false;  // it depends on elements, or is wrong: which is seen, and said, when it is computed
    }
    for (auto& [made, original] : originals_) {
      at::Tensor own = held_.at(made);
      if (own.sizes() != original.sizes() || own.strides() != original.strides()) return false;
    }
    for (const IValue& value : stack) {
      if (!value.isTensor()) return false;
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && !original_of(tensor) && is_view_of_an_argument(tensor)) return false;
    }
    returned_ = std::move(stack);
    return true;
  }

  // Return tensors of the GPU that the results come to lie in: arguments, or new ones.
  std::vector<at::Tensor> make(c10::Device device) const {
    std::vector<at::Tensor> made;
    for (const IValue& value : returned_) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) {
        made.emplace_back();
      } else if (auto original = original_of(tensor)) {
        made.push_back(*original);
      } else {
        made.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)));
      }
    }
    return made;
  }

  bool is_argument(std::size_t index) const { return original_of(returned_[index].toTensor()).has_value(); }

 private:
  IValue without_elements(const IValue& value) {
    if (auto found = with_tensors(value, [&](const at::Tensor& each) { return without_elements(each); })) return *found;
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kMeta);
    if (value.isGenerator()) is_known_ = false;
    return value;
  }

  at::Tensor without_elements(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      is_known_ &= tensor.dim() == 0;  // a number
      return tensor;
    }
    for (auto& [made, original] : originals_) {
      if (original.is_same(tensor)) return held_.at(made);
    }
    at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    originals_.emplace(made.unsafeGetTensorImpl(), tensor);
    held_.emplace(made.unsafeGetTensorImpl(), made);
    return made;
  }

  std::optional<at::Tensor> original_of(const at::Tensor& tensor) const {
    auto found = originals_.find(tensor.unsafeGetTensorImpl());
    return found == originals_.end() ? std::nullopt : std::optional(found->second);
  }

  bool is_view_of_an_argument(const at::Tensor& tensor) const {
    for (auto& [made, own] : held_) {
      if (own.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) return true;
    }
    return false;
  }

  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_, held_;
  Stack returned_;
  bool is_known_ = true;
};

// A number may be another by the time that it is used.
IValue held_now(const IValue& value) {
  auto held = [](const at::Tensor& each) {
    if (!each.defined() || each.dim() > 0) return each;
    at::Tensor made = each.clone();
    if (each.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  };
  return with_tensors(value, held).value_or(value);
}

// Queue a call on the current stream and return what its results come to lie in; not what reads elements to know its
// result's size, nor random numbers, nor what copies from or to the host, all of which is computed at once.
std::optional<std::vector<at::Tensor>> queue(
    const c10::OperatorHandle& op, const std::vector<IValue>& given, const Call& call, const Stack& arguments) {
  Shapes shapes;
  if (is_random(op) || !call.device() || !call.is_of_one_device() || !shapes.learn(op, given)) return std::nullopt;
  std::vector<at::Tensor> made = shapes.make(*call.device()), there;
  for (std::size_t index = 0; index < made.size(); index++) {
    bool is_new = made[index].defined() && !shapes.is_argument(index);
    there.push_back(is_new ? on_cpu(made[index]) : at::Tensor());
  }
  Stack stack;
  for (std::size_t index = 0; index < arguments.size(); index++) {
    // Views of the GPU's memory stay as they are; they have no elements of their own.
    bool is_number = given[index].isTensor() && !given[index].toTensor().is_cuda();
    stack.push_back(is_number ? held_now(arguments[index]) : arguments[index]);
  }
  int num_threads = at::get_num_threads();
  auto work = [op, stack = std::move(stack), there, num_threads]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
    try {
      op.callBoxed(stack);
      for (std::size_t index = 0; index < there.size(); index++) {
        if (there[index].defined()) there[index].copy_(stack[index].toTensor());
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "simulated GPU: %s fails: %s\n", op.schema().name().c_str(), error.what());
      std::abort();
    }
  };
  enqueue_on_current_stream(call.device()->has_index() ? call.device()->index() : c10::cuda::current_device(), work);
  return made;
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
  c10::OptionalDeviceGuard guard(call.device());
  bool counts = num_arguments > 0 && arguments[0].isTensor() && counts_integers(op, arguments[0]);
  if (simulated_gpu_is_late() && !counts) {
    std::vector<IValue> given;
    for (const IValue& value : torch::jit::last(*stack, num_arguments)) given.push_back(value);
    if (auto made = queue(op, given, call, arguments)) {
      torch::jit::drop(*stack, num_arguments);
      for (const at::Tensor& each : *made) torch::jit::push(*stack, each);
      return;
    }
  }
  call.synchronize();
  {
    at::AutoDispatchBelowAutograd below;
    try {
      if (is_random(op) && call.device()) {
        run_seeded(op, arguments, call);
      } else if (counts) {
        count_integers(op, arguments);
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
  bool is_within = self.is_cuda() && self.device() == source.device() && self.sizes() == source.sizes();
  if (simulated_gpu_is_late() && is_within) {
    enqueue_on_current_stream(self.device().index(), [to = on_cpu(self), from = on_cpu(source)]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      to.copy_(from);
    });
    return self;
  }
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
