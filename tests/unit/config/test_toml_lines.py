"""Line numbers of keys, for messages."""

from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.config.site_file import line_of


def test_line_numbers_are_right_despite_strings_and_lists():
    text = '''
a = """
[node]
accel = "no" """
b = [
  "[node]", # [node]
  "accel = 1",
]
c = {d = 1, e = ']'} # x = 1
"q.r" . 's' = 1
[ node ] # first
accel = "kvm"
[[many]]
k = 1
'''
    assert line_of(text, "node.accel") == 12
    assert line_of(text, "node") == 11
    assert line_of(text, "node.other") == 11
    assert line_of(text, "c.d") == 9
    assert line_of(text, "q.r.s") == 10
    assert line_of(text, "many.1.k") == 14
    assert line_of(text, "nothing") is None


def test_line_of_a_key_after_a_long_list_is_right():
    text = "deny = [\n" + '  "an-image",\n' * 20_000 + "]\nlast = 1\n"
    assert line_of(text, "deny") == 1
    assert line_of(text, "last") == 20_003


@given(st.text(max_size=300) | st.lists(st.sampled_from(list("[]{}=\"'#.\n\\ ab")), max_size=60))
def test_line_of_returns_for_any_text(text):
    text = "".join(text)
    line = line_of(text, "a.b")
    assert line is None or 1 <= line <= text.count("\n") + 1
