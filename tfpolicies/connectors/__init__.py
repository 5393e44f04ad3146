"""Connectors: optional preprocessing steps between environments and policies, in pipelines.

Importing the package registers its connectors, so that their states can be restored.
"""

from tfpolicies.connectors.action_connectors import ClipActions as ClipActions
from tfpolicies.connectors.action_connectors import UnsquashActions as UnsquashActions
from tfpolicies.connectors.agent_connectors import ClipObservations as ClipObservations
from tfpolicies.connectors.agent_connectors import ClipReward as ClipReward
from tfpolicies.connectors.agent_connectors import FlattenObservations as FlattenObservations
from tfpolicies.connectors.agent_connectors import ObservationConnector as ObservationConnector
from tfpolicies.connectors.connector import ActionConnector as ActionConnector
from tfpolicies.connectors.connector import ActionStep as ActionStep
from tfpolicies.connectors.connector import AgentConnector as AgentConnector
from tfpolicies.connectors.connector import AgentStep as AgentStep
from tfpolicies.connectors.connector import Connector as Connector
from tfpolicies.connectors.connector import register_connector as register_connector
from tfpolicies.connectors.connector import restore as restore
from tfpolicies.connectors.frame_stack import FrameStack as FrameStack
from tfpolicies.connectors.own_filter import OwnFilter as OwnFilter
from tfpolicies.connectors.pipelines import ActionConnectorPipeline as ActionConnectorPipeline
from tfpolicies.connectors.pipelines import AgentConnectorPipeline as AgentConnectorPipeline
from tfpolicies.connectors.pipelines import connector_metrics as connector_metrics
from tfpolicies.connectors.pipelines import pipelines_from_state as pipelines_from_state
from tfpolicies.connectors.pipelines import pipelines_to_state as pipelines_to_state
