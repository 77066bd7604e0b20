// TensorRT's side of a plugin, so far as it asks a plugin: the virtual functions of NVIDIA's headers are called on objects
// that Python made in TensorRT's bindings, and what comes back is written down as JSON. Expressions of dimensions, which
// TensorRT alone makes, are made here: text and value.
#include <NvInfer.h>
#include <impl/NvInferPythonPlugin.h>

#include <algorithm>
#include <deque>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Expression final : IDimensionExpr, apiv::VDimensionExpr {
    std::string text;
    int64_t value;
    bool constant;
    Expression(std::string t, int64_t v, bool c) : text(std::move(t)), value(v), constant(c) { mImpl = this; }
    bool isConstant() const override { return constant; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }
};

std::deque<Expression> expressions;

Expression const* expression(std::string text, int64_t value, bool constant) {
    return &expressions.emplace_back(std::move(text), value, constant);
}

struct Expressions final : IExprBuilder, apiv::VExprBuilder {
    Expressions() { mImpl = this; }
    IDimensionExpr const* constant(int64_t value) override { return expression(std::to_string(value), value, true); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& x, IDimensionExpr const& y) override {
        auto const& a = static_cast<Expression const&>(x);
        auto const& b = static_cast<Expression const&>(y);
        auto made = [&](char const* name, int64_t value) {
            return expression("(" + a.text + name + b.text + ")", value, a.constant && b.constant);
        };
        switch (op) {
        case DimensionOperation::kSUM: return made(" + ", a.value + b.value);
        case DimensionOperation::kSUB: return made(" - ", a.value - b.value);
        case DimensionOperation::kPROD: return made(" * ", a.value * b.value);
        case DimensionOperation::kMAX: return made(" max ", std::max(a.value, b.value));
        case DimensionOperation::kMIN: return made(" min ", std::min(a.value, b.value));
        case DimensionOperation::kFLOOR_DIV: return made(" // ", a.value / b.value);
        case DimensionOperation::kCEIL_DIV: return made(" cdiv ", (a.value + b.value - 1) / b.value);
        default: return nullptr;
        }
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override {
        return nullptr;
    }
};

struct Numbers final : ISymExprs, ISymExprsImpl {
    std::vector<ISymExpr*> all;
    Numbers() { mImpl = this; }
    ISymExpr* getSymExpr(int32_t at) const noexcept override { return all.at(at); }
    bool setSymExpr(int32_t at, ISymExpr* one) noexcept override { return (all.at(at) = one) != nullptr; }
    int32_t getNbSymExprs() const noexcept override { return all.size(); }
    bool setNbSymExprs(int32_t count) noexcept override { return all.resize(count), true; }
};

#define SIZE(NAME, AT) \
    ISymExpr* get##NAME() noexcept override { return all[AT]; } \
    bool set##NAME(ISymExpr* one) noexcept override { return (all[AT] = one) != nullptr; }

struct Launch final : IKernelLaunchParams, IKernelLaunchParamsImpl {
    ISymExpr* all[7]{};
    Launch() { mImpl = this; }
    SIZE(GridX, 0) SIZE(GridY, 1) SIZE(GridZ, 2) SIZE(BlockX, 3) SIZE(BlockY, 4) SIZE(BlockZ, 5) SIZE(SharedMem, 6)
};

// Tensors of a node, inputs first. sizes: of each dimension; symbols: its letter, or 0 where it never changes.
struct Tensors {
    int32_t inputs, outputs;
    int32_t const* types;
    int32_t const* ranks;
    int64_t const* sizes;
    char const* symbols;
};

struct Described {
    std::vector<DataType> types;
    std::vector<DimsExprs> dims;
    std::vector<DynamicPluginTensorDesc> tensors;
    std::vector<PluginTensorDesc> now;
};

Described describe(Tensors const& given) {
    Described made;
    int64_t at = 0;
    for (int32_t i = 0; i < given.inputs + given.outputs; ++i) {
        DimsExprs dims{};
        DynamicPluginTensorDesc tensor{};
        PluginTensorDesc now{};
        tensor.desc.type = now.type = static_cast<DataType>(given.types[i]);
        tensor.desc.format = now.format = TensorFormat::kLINEAR;
        for (auto* all : {&tensor.desc.dims, &tensor.min, &tensor.opt, &tensor.max, &now.dims}) all->nbDims = given.ranks[i];
        dims.nbDims = given.ranks[i];
        for (int32_t axis = 0; axis < given.ranks[i]; ++axis, ++at) {
            int64_t const size = given.sizes[at];
            char const symbol = given.symbols[at];
            dims.d[axis] = expression(symbol ? std::string(1, symbol) : std::to_string(size), size, !symbol);
            tensor.desc.dims.d[axis] = symbol ? -1 : size;
            tensor.min.d[axis] = symbol ? 1 : size;
            tensor.opt.d[axis] = tensor.max.d[axis] = now.dims.d[axis] = size;
        }
        made.types.push_back(now.type);
        made.dims.push_back(dims);
        made.tensors.push_back(tensor);
        made.now.push_back(now);
    }
    return made;
}

std::string report, kernel;

struct Writer {
    std::ostringstream text;
    template <class T> Writer& operator()(char const* name, T const& value) {
        text << (text.tellp() > 0 ? ", " : "{") << '"' << name << "\": " << json(value);
        return *this;
    }
    static std::string json(char const* value) { return value ? '"' + std::string(value) + '"' : "null"; }
    static std::string json(int64_t value) { return std::to_string(value); }
    template <class T> static std::string json(std::vector<T> const& values) {
        std::string made;
        for (auto const& each : values) made += (made.empty() ? "" : ", ") + json(each);
        return "[" + made + "]";
    }
    static std::string json(std::string const& value) { return json(value.c_str()); }
    char const* done() { return (report = text.str() + "}").c_str(); }
};

std::string shown(ISymExpr* one) {
    bool const int32 = one->getType() == PluginArgType::kINT && one->getDataType() == PluginArgDataType::kINT32;
    return (int32 ? "" : "no int32: ") + static_cast<Expression const*>(static_cast<IDimensionExpr*>(one->getExpr()))->text;
}

template <class Build> void ask(Writer& write, Build& build, Described& all, int32_t inputs, std::vector<DataType>& types) {
    auto const outputs = static_cast<int32_t>(types.size());
    Expressions builder;
    std::vector<DimsExprs> dims(outputs);
    write("outputs", build.getNbOutputs());
    write("shapes_code", build.getOutputShapes(all.dims.data(), inputs, nullptr, 0, dims.data(), outputs, builder));
    std::vector<std::vector<std::string>> shapes;
    for (auto const& each : dims) {
        auto& shape = shapes.emplace_back();
        for (int32_t axis = 0; axis < each.nbDims; ++axis) shape.push_back(static_cast<Expression const*>(each.d[axis])->text);
    }
    std::vector<int64_t> kinds, aliases;
    for (int32_t i = 0; i < outputs; ++i) {
        kinds.push_back(static_cast<int64_t>(types[i]));
        aliases.push_back(build.getAliasedInput(i));
    }
    write("types", kinds)("shapes", shapes)("aliases", aliases);
    auto const* tensors = all.tensors.data();
    write("configured", build.configurePlugin(tensors, inputs, tensors + inputs, outputs));
    write("tactics", build.getNbTactics());
    write("timing", build.getTimingCacheID())("metadata", build.getMetadataString());
}

}  // namespace

// What TensorRT asks of a node whose kernel it stores, through its creator.
extern "C" char const* ask_stored(IPluginCreatorV3Quick* creator, char const* op, char const* space,
                                  PluginFieldCollection const* fields, int32_t request, Tensors const* given) {
    Writer write;
    write("creator", creator->getInterfaceInfo().kind)("operator", creator->getPluginName());
    write("fields", creator->getFieldNames()->nbFields);
    auto* first = creator->createPlugin(op, space, fields, TensorRTPhase::kBUILD, static_cast<QuickPluginCreationRequest>(request));
    auto* plugin = first ? first->clone() : nullptr;
    if (!plugin) return write("error", "no plugin").done();
    auto* core = static_cast<IPluginV3QuickCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    auto* build = static_cast<IPluginV3QuickAOTBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    write("name", core->getPluginName())("namespace", core->getPluginNamespace())("build", build->getInterfaceInfo().kind);
    auto all = describe(*given);
    std::vector<int32_t> const ranks(given->ranks, given->ranks + given->inputs);
    std::vector<DataType> types(given->outputs);
    write("types_code", build->getOutputDataTypes(types.data(), given->outputs, all.types.data(), ranks.data(), given->inputs));
    ask(write, *build, all, given->inputs, types);
    auto const* tensors = all.tensors.data();
    std::vector<PluginTensorDesc> formats(all.tensors.size());
    write("formats", build->getNbSupportedFormatCombinations(tensors, given->inputs, given->outputs));
    write("formats_code", build->getSupportedFormatCombinations(tensors, given->inputs, given->outputs, formats.data(), 1));
    bool same = true;
    for (size_t i = 0; i < formats.size(); ++i) {
        same = same && formats[i].type == all.types[i] && formats[i].format == TensorFormat::kLINEAR;
    }
    write("linear", same)("tactic", build->setTactic(0));
    Expressions builder;
    for (int32_t profile = 0; profile < 2; ++profile) {
        Launch launch;
        Numbers numbers;
        int32_t const code = build->getLaunchParams(all.dims.data(), tensors, given->inputs, given->outputs, &launch, &numbers, builder);
        if (code) return write("error", "no launch").done();
        std::vector<std::string> sizes, passed;
        for (auto* each : launch.all) sizes.push_back(shown(each));
        for (auto* each : numbers.all) passed.push_back(shown(each));
        write(profile ? "second_launch" : "launch", sizes)(profile ? "second_numbers" : "numbers", passed);
    }
    char const* symbol = nullptr;
    char* code = nullptr;
    int32_t size = 0;
    write("kernel", build->getKernel(all.now.data(), given->inputs, all.now.data() + given->inputs, given->outputs, &symbol, &code, &size));
    kernel = std::string(code, size);
    return write("symbol", symbol).done();
}

// The code that the last node gave.
extern "C" char const* kernel_code() { return kernel.c_str(); }

// What TensorRT asks of PagedAttention while it builds; then the plugin that is made again of its fields, attached to a
// context, is run. workspace: of as many bytes.
extern "C" char const* run_plugin(IPluginCreatorV3One* creator, PluginFieldCollection const* fields, Tensors const* given,
                                  void const* const* inputs, void* const* outputs, void* workspace, int64_t bytes) {
    Writer write;
    write("creator", creator->getInterfaceInfo().kind)("operator", creator->getPluginName());
    write("fields", creator->getFieldNames()->nbFields);
    auto* first = creator->createPlugin("a node", fields, TensorRTPhase::kBUILD);
    auto* plugin = first ? first->clone() : nullptr;
    if (!plugin) return write("error", "no plugin").done();
    auto* core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    auto* build = static_cast<v_2_0::IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    write("name", core->getPluginName())("namespace", core->getPluginNamespace())("build", build->getInterfaceInfo().kind);
    write("build_version", build->getInterfaceInfo().major);
    auto all = describe(*given);
    std::vector<DataType> types(given->outputs);
    write("types_code", build->getOutputDataTypes(types.data(), given->outputs, all.types.data(), given->inputs));
    ask(write, *build, all, given->inputs, types);
    auto const* tensors = all.tensors.data();
    std::vector<int64_t> supported;
    for (int32_t i = 0; i < given->inputs + given->outputs; ++i) {
        supported.push_back(build->supportsFormatCombination(i, tensors, given->inputs, given->outputs));
    }
    auto const needed = static_cast<int64_t>(build->getWorkspaceSize(tensors, given->inputs, tensors + given->inputs, given->outputs));
    write("supported", supported)("workspace", needed);
    auto* runtime = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    auto const* kept = runtime->getFieldsToSerialize();
    write("kept", kept->nbFields);
    auto* loaded = creator->createPlugin("a node", kept, TensorRTPhase::kRUNTIME);
    if (!loaded) return write("error", "no plugin of an engine").done();
    runtime = static_cast<IPluginV3OneRuntime*>(loaded->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    auto* attached = runtime->attachToContext(nullptr);
    if (!attached) return write("error", "not attached").done();
    runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    auto const *now = all.now.data(), *after = now + given->inputs;
    write("tactic", runtime->setTactic(0))("shape_change", runtime->onShapeChange(now, given->inputs, after, given->outputs));
    if (bytes < needed) return write("error", "too little workspace").done();
    return write("enqueue", runtime->enqueue(now, after, inputs, outputs, workspace, nullptr)).done();
}
