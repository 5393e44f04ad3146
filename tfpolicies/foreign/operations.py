"""Which operations of TensorFlow a SavedModel of a stranger may have.

A SavedModel is a program, and TensorFlow's operations read and write files, open connections and
call Python. Those listed here compute from their inputs and from the model's own variables alone.
What else there is, operations of other libraries included, is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_NUMBERS = (
    "Abs Acos Acosh Add AddN AddV2 All Angle Any ApproximateEqual ArgMax ArgMin Asin Asinh Atan "
    "Atan2 Atanh BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddV1 Bincount BitwiseAnd "
    "BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj "
    "Cos Cosh Cross Cumprod Cumsum CumulativeLogsumexp DenseBincount Digamma Div DivNoNan Einsum "
    "Elu Equal Erf Erfc Erfinv EuclideanNorm Exp Expm1 Floor FloorDiv FloorMod Greater "
    "GreaterEqual Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan L2Loss LeakyRelu LeftShift "
    "Less LessEqual Lgamma LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul "
    "Max Maximum Mean Min Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual Polygamma "
    "PopulationCount Pow Prod Range Real RealDiv Reciprocal Relu Relu6 RightShift Rint Round Rsqrt "
    "SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum Select SelectV2 Selu Sigmoid Sign "
    "Sin Sinh Softmax Softplus Softsign SparseSoftmaxCrossEntropyWithLogits "
    "SoftmaxCrossEntropyWithLogits Sqrt Square SquaredDifference Sub Sum Tan Tanh TruncateDiv "
    "TruncateMod UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum "
    "Xdivy Xlog1py Xlogy Zeta"
)
_SHAPES = (
    "BatchToSpace BatchToSpaceND Bitcast BroadcastArgs BroadcastTo Concat ConcatOffset ConcatV2 "
    "Const DeepCopy DepthToSpace Diag DiagPart DynamicPartition DynamicStitch Empty EnsureShape "
    "ExpandDims Fill Gather GatherNd GatherV2 Identity IdentityN InvertPermutation MatrixBandPart "
    "MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 "
    "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MirrorPad OneHot OnesLike Pack Pad PadV2 "
    "ParallelConcat ParallelDynamicStitch Placeholder PlaceholderWithDefault PreventGradient Rank "
    "Reshape Reverse ReverseSequence ReverseV2 Roll ScatterNd Shape ShapeN Size Slice Snapshot "
    "SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice "
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate Tile "
    "TopK TopKV2 Transpose Unique UniqueV2 UniqueWithCounts Unpack UnravelIndex Where ZerosLike"
)
_LAYERS = (
    "AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D BlockLSTM BlockLSTMV2 Cholesky "
    "Conv Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 CropAndResize "
    "DepthwiseConv2dNative Dilation2D ExtractImagePatches FusedBatchNorm FusedBatchNormV2 "
    "FusedBatchNormV3 GRUBlockCell LRN LSTMBlockCell MatrixDeterminant MatrixInverse MatrixSolve "
    "MatrixTriangularSolve MaxPool MaxPool3D MaxPoolV2 Qr ResizeArea ResizeBicubic ResizeBilinear "
    "ResizeNearestNeighbor ScaleAndTranslate Svd"
)
_CONTROL = (
    "Assert Case Enter Exit If LoopCond Merge NextIteration NoOp PartitionedCall "
    "StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile Switch While EmptyTensorList "
    "TensorListConcatV2 TensorListElementShape TensorListFromTensor TensorListGather "
    "TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListReserve "
    "TensorListResize TensorListScatterV2 TensorListSetItem TensorListStack"
)
_CHANCE = (
    "Multinomial ParameterizedTruncatedNormal RandomGammaGrad RandomPoissonV2 RandomShuffle "
    "RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip RngSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt "
    "StatefulUniformInt StatelessMultinomial StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter "
    "StatelessRandomGetKeyCounterAlg StatelessRandomNormal StatelessRandomNormalV2 "
    "StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt "
    "StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2 "
    "StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2 "
    "TruncatedNormal"
)
_VARIABLES = (
    "AssignAddVariableOp AssignSubVariableOp AssignVariableOp DisableCopyOnRead ReadVariableOp "
    "ResourceGather ResourceGatherNd ResourceScatterAdd ResourceScatterUpdate VarHandleOp "
    "VarIsInitializedOp VariableShape"
)

KNOWN = frozenset(" ".join((_NUMBERS, _SHAPES, _LAYERS, _CONTROL, _CHANCE, _VARIABLES)).split())
"""The names of those that may be anywhere."""

_FILES = "MergeV2Checkpoints RestoreV2 SaveV2 ShardedFilename StaticRegexFullMatch StringJoin"
SAVING = frozenset(_FILES.split())
"""Those that may be where a SavedModel saves and restores itself, which is never run here."""


def unknown_operations(graph: Any) -> list[str]:
    """Returns the names of operations that a model may not have, in order.

    Args:
        graph: a `MetaGraphDef`. Of its own nodes nothing is run, but they tell which functions save
            and restore.
    """
    functions = {each.signature.name: each for each in graph.graph_def.library.function}
    saving = {name for name, each in functions.items() if _operations(each) & SAVING}
    used = {name for name in saving if name not in _savers(graph)}
    used |= saving & {name for each in functions.values() for name in _called(each.node_def)}
    used |= saving & set(graph.object_graph_def.concrete_functions)
    found: set[str] = set()
    for name, each in functions.items():
        allowed = KNOWN | (frozenset() if name in used else SAVING)
        found |= _operations(each) - allowed - functions.keys()
    return sorted(found)


def mistyped_constants(graph: Any) -> list[str]:
    """Returns the names of constants whose value is of another type than the constant, in order.

    TensorFlow 2.18 does not refuse them, and ends the process where it reads such a value while it
    infers shapes.
    """
    return sorted(
        node.name
        for function in graph.graph_def.library.function
        for node in function.node_def
        if node.op == "Const" and node.attr["dtype"].type != node.attr["value"].tensor.dtype
    )


def _operations(function: Any) -> set[str]:
    return {node.op for node in function.node_def}


def _savers(graph: Any) -> set[str]:
    """Returns the functions that the nodes of a model's own saver call."""
    saver = graph.saver_def
    names = (saver.save_tensor_name, saver.restore_op_name)
    own = {name.partition(":")[0] for name in names}
    return set(_called(node for node in graph.graph_def.node if node.name in own))


def _called(nodes: Iterable[Any]) -> Iterator[str]:
    """Yields the names of functions that nodes refer to, and of those that are operations."""
    for node in nodes:
        yield node.op
        for value in node.attr.values():
            yield value.func.name
            yield from (each.name for each in value.list.func)
