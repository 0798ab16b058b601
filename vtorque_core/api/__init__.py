"""Public API for plugins. It imports few modules, because every ``vsub`` imports it."""

from vtorque_core.api.strategies import BatchSystem as BatchSystem
from vtorque_core.api.strategies import Command as Command
from vtorque_core.api.strategies import GuestType as GuestType
from vtorque_core.api.strategies import ImageBuilder as ImageBuilder
from vtorque_core.api.strategies import ImageSource as ImageSource
from vtorque_core.api.strategies import Remote as Remote
from vtorque_core.api.strategies import deferred as deferred
from vtorque_core.api.values import Act as Act
from vtorque_core.api.values import Extra as Extra
from vtorque_core.api.values import FileData as FileData
from vtorque_core.api.values import Image as Image
from vtorque_core.api.values import JobRequest as JobRequest
from vtorque_core.api.values import Option as Option
from vtorque_core.api.values import constant_hook as constant_hook
from vtorque_core.api.values import hookimpl as hookimpl
from vtorque_core.api.values import text as text
from vtorque_core.base import safefs
from vtorque_core.base.errors import EXIT_FAILED as EXIT_FAILED
from vtorque_core.base.errors import EXIT_GUEST_DIED as EXIT_GUEST_DIED
from vtorque_core.base.errors import EXIT_HOST_FAULT as EXIT_HOST_FAULT
from vtorque_core.base.errors import EXIT_OUTPUT as EXIT_OUTPUT
from vtorque_core.base.errors import EXIT_REFUSED as EXIT_REFUSED
from vtorque_core.base.errors import ConfigError as ConfigError
from vtorque_core.base.errors import HostFault as HostFault
from vtorque_core.base.errors import InUse as InUse
from vtorque_core.base.errors import OutputError as OutputError
from vtorque_core.base.errors import Refusal as Refusal
from vtorque_core.base.errors import Refused as Refused
from vtorque_core.base.errors import UsageError as UsageError
from vtorque_core.base.errors import VtorqueError as VtorqueError
from vtorque_core.base.errors import printable as printable
from vtorque_core.base.locks import Busy as Busy
from vtorque_core.base.locks import take_lock as take_lock
from vtorque_core.base.names import JobAttempt as JobAttempt
from vtorque_core.base.names import Paths as Paths
from vtorque_core.base.names import derive as derive
from vtorque_core.base.run_tool import NOBODY as NOBODY
from vtorque_core.base.run_tool import guard_command as guard_command
from vtorque_core.base.run_tool import isolate_command as isolate_command
from vtorque_core.base.run_tool import run_tool as run_tool
from vtorque_core.base.settings import setting as setting
from vtorque_core.base.sizes import BOOLEAN_WORDS as BOOLEAN_WORDS
from vtorque_core.base.sizes import boolean as boolean
from vtorque_core.base.sizes import count as count
from vtorque_core.base.sizes import duration as duration
from vtorque_core.base.sizes import show_mib as show_mib
from vtorque_core.base.sizes import size_mib as size_mib
from vtorque_core.base.sizes import walltime as walltime
from vtorque_core.base.trust import require_root_owned as require_root_owned
from vtorque_core.base.trust import require_secret as require_secret

closing = safefs.closing
let_users = safefs.set_acl
name_errors = safefs.name_errors
replace_file = safefs.replace
