package script

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// echo prints words, each on a line; the word error makes an error of the rest, and nothing prints nothing.
func echo(words []string) (string, error) {
	switch words[0] {
	case "error":
		return "", errors.New(strings.Join(words[1:], " "))
	case "nothing":
		return "", nil
	}
	return strings.Join(words, "\n"), nil
}

func TestRun(t *testing.T) { Run(t, "testdata/echo.txt", echo) }

// TestFile is run by TestFails in another process: a script that fails does so without ending this one.
func TestFile(t *testing.T) {
	file := os.Getenv("SCRIPT_TEST_FILE")
	if file == "" {
		t.Skip("TestFails names a file")
	}
	Run(t, file, echo)
}

// TestFails: a wrong script fails and is left as it is, and -rewrite makes a right one of what is only printed otherwise.
func TestFails(t *testing.T) {
	for name, c := range map[string]struct{ script, text, rewritten string }{
		"another line":    {"a\n----\nb\n", ":1: a: got\na\nwant\nb\n", "a\n----\na\n"},
		"a line too few":  {"a b\n----\na\n", "got\na\nb\nwant\na\n", "a b\n----\na\nb\n"},
		"a line too many": {"a\n----\na\nb\n\n# c\nc\n----\nc\n", "want\na\nb\n", "a\n----\na\n\n# c\nc\n----\nc\n"},
		"the second":      {"a\n----\na\n\nb\n----\na\n", ":5: b: got\nb\nwant\na\n", "a\n----\na\n\nb\n----\nb\n"},
		"an error":        {"error x\n----\n", "got\nerror: x\nwant\n", "error x\n----\nerror: x\n"},
		"no error":        {"a\n----\na\nerror: x\n", "got\na\nwant\na\nerror: x\n", "a\n----\na\n"},
		"no separator":    {"a\nb\n", ":2: no line ----", ""},
		"an empty line":   {"a\n\n----\na\n", ":1: no line ----", ""},
		"empty output":    {"a \"\" b\n----\na\n\nb\n", "an empty line ends a block", ""},
		"no quote":        {"\"a\n----\na\n", ":1: invalid syntax: \"a", ""},
		"no commands":     {"# nothing\n", "has no commands", ""},
		"no file":         {"", "no such file", ""},
	} {
		file := filepath.Join(t.TempDir(), "script.txt")
		if name != "no file" {
			if err := os.WriteFile(file, []byte(c.script), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		run := func(flags ...string) (string, error) {
			cmd := exec.Command(os.Args[0], append([]string{"-test.run", "^TestFile$"}, flags...)...)
			cmd.Env = append(os.Environ(), "SCRIPT_TEST_FILE="+file)
			out, err := cmd.CombinedOutput()
			// Lines of a message are indented.
			return strings.ReplaceAll(string(out), "\n        ", "\n"), err
		}
		if out, err := run(); err == nil || !strings.Contains(out, c.text) {
			t.Errorf("%s: %v, want %q:\n%s", name, err, c.text, out)
		}
		if is, _ := os.ReadFile(file); string(is) != c.script {
			t.Errorf("%s: the file is\n%s", name, is)
		}
		out, err := run("-rewrite")
		want := c.rewritten
		if (err == nil) != (want != "") {
			t.Errorf("%s, -rewrite: %v:\n%s", name, err, out)
		}
		if want == "" {
			want = c.script
		}
		if is, _ := os.ReadFile(file); string(is) != want {
			t.Errorf("%s, -rewrite: the file is\n%s", name, is)
		}
		if out, err := run(); (err == nil) != (c.rewritten != "") {
			t.Errorf("%s, rewritten: %v:\n%s", name, err, out)
		}
	}
}

func TestSplit(t *testing.T) {
	for line, want := range map[string][]string{
		"a  b ":                 {"a", "b"},
		`"a b" "" c"d`:          {"a b", "", `c"d`},
		"`a\\n` \"\\n\\u00e9\"": {`a\n`, "\né"},
	} {
		if got, err := split(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, want %q", line, got, err, want)
		}
	}
}
