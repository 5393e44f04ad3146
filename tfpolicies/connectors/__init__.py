"""What stands between environments and policies, in rows that users can put together.

Importing the package registers its connectors, so that states of them can be restored.
"""

from tfpolicies.connectors.action_connectors import ClipActions, UnsquashActions
from tfpolicies.connectors.agent_connectors import (
    ClipObservations,
    ClipReward,
    FlattenObservations,
    ObservationConnector,
)
from tfpolicies.connectors.connector import (
    ActionConnector,
    ActionStep,
    AgentConnector,
    AgentStep,
    Connector,
    register_connector,
    restore,
)
from tfpolicies.connectors.frame_stack import FrameStack
from tfpolicies.connectors.own_filter import OwnFilter
from tfpolicies.connectors.pipelines import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    connector_metrics,
    pipelines_from_state,
    pipelines_to_state,
)

__all__ = [
    "ActionConnector",
    "ActionConnectorPipeline",
    "ActionStep",
    "AgentConnector",
    "AgentConnectorPipeline",
    "AgentStep",
    "ClipActions",
    "ClipObservations",
    "ClipReward",
    "Connector",
    "FlattenObservations",
    "FrameStack",
    "ObservationConnector",
    "OwnFilter",
    "UnsquashActions",
    "connector_metrics",
    "pipelines_from_state",
    "pipelines_to_state",
    "register_connector",
    "restore",
]
