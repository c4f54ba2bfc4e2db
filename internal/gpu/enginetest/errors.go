package enginetest

import (
	"errors"
	"strings"
	"testing"
)

// IsError says whether there is an error that wraps a sentinel.
func IsError(err, sentinel error) bool { return err != nil && errors.Is(err, sentinel) }

// NoError ends the test at an error.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// WantError checks that an error wraps a sentinel and says something.
func WantError(t testing.TB, what string, err, sentinel error, text string) {
	t.Helper()
	if !IsError(err, sentinel) || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v; want %q and %v", what, err, text, sentinel)
	}
}
