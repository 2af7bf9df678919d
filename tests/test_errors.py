"""Single errors out of exception groups."""

import pytest
import trio

from trio_pool_serve.errors import EngineDeadError, InvalidRequestError, ModelLoadError, unwrap_exception_groups


def test_the_first_of_the_first_type_is_raised():
    first, second = ModelLoadError("first"), ModelLoadError("second")
    group = ExceptionGroup("", [EngineDeadError("dead"), ExceptionGroup("", [first]), second])
    with pytest.raises(ModelLoadError) as caught, unwrap_exception_groups(ModelLoadError, EngineDeadError):
        raise group
    assert caught.value is first


def test_the_cause_of_an_error_is_kept_and_its_group_is_not_shown():
    cause = OSError("no such file")

    def load() -> None:
        raise ModelLoadError("cannot be loaded") from cause

    with pytest.raises(ModelLoadError) as caught, unwrap_exception_groups(ModelLoadError):
        try:
            load()
        except ModelLoadError as error:
            raise ExceptionGroup("", [error]) from None
    assert caught.value.__cause__ is cause
    assert caught.value.__suppress_context__


def test_other_exceptions_are_raised_without_the_expected_ones():
    group = ExceptionGroup("", [EngineDeadError("dead"), ExceptionGroup("", [ValueError("a fault")])])
    with (
        pytest.RaisesGroup(ValueError, flatten_subgroups=True) as caught,
        unwrap_exception_groups(ModelLoadError, EngineDeadError),
    ):
        raise group
    assert caught.value.subgroup(EngineDeadError) is None


def test_groups_without_an_expected_error_and_plain_exceptions_pass():
    for unexpected in (ExceptionGroup("", [ValueError()]), ValueError(), EngineDeadError("dead")):
        with pytest.raises(type(unexpected)) as caught, unwrap_exception_groups(ModelLoadError):
            raise unexpected
        assert caught.value is unexpected


async def test_a_cancellation_goes_on():
    """The error of a request that is cancelled from outside is not raised past the scope that was cancelled."""
    with trio.CancelScope() as outer, unwrap_exception_groups(InvalidRequestError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            outer.cancel()
            raise InvalidRequestError("too late")
    assert outer.cancelled_caught


def test_a_clients_text_in_a_message_is_no_placeholder():
    error = InvalidRequestError("{dimensions} must be from 1 to 8, not '{queries}'.", field="dimensions")
    assert str(error) == "dimensions must be from 1 to 8, not '{queries}'."
    renamed = error.message_with({"dimensions": "size", "queries": "query"}.get)
    assert renamed == "size must be from 1 to 8, not '{queries}'."
