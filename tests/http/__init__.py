import pytest

pytest.register_assert_rewrite("tests.http.plain", "tests.http.world")
