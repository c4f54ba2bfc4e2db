// Package script runs tests that are text files: blocks of commands, and what each block prints.
//
//	# A comment.
//	append a 3
//	append "a long name" 4
//	----
//	a: 3 tokens
//	error: no room for 4 tokens
//
// A block ends at an empty line or at the end of the file. A command is words, in Go's quotes where they
// have spaces or none of their own. With the flag -rewrite the file gets what the commands print.
package script

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write what commands print into the files of scripts, instead of comparing")

const separator = "----"

// Run gives the commands of a file to do, one after the other, and compares what each block prints with the
// file. An error is printed behind the text, as "error: " and its message.
func Run(t *testing.T, file string, do func(words []string) (string, error)) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	was := strings.ReplaceAll(string(data), "\r\n", "\n")
	blocks, is := 0, strings.Builder{}
	for lines, at := strings.Split(strings.TrimRight(was, "\n"), "\n"), 0; at < len(lines); {
		line := lines[at]
		fmt.Fprintln(&is, line)
		if at++; line == "" || line[0] == '#' {
			continue
		}
		var printed strings.Builder
		first := at
		for ; line != separator; at++ {
			words, err := split(line)
			if err != nil {
				t.Fatalf("%s:%d: %v", file, at, err)
			}
			text, err := do(words)
			printed.WriteString(text)
			if text != "" && !strings.HasSuffix(text, "\n") {
				printed.WriteByte('\n')
			}
			if err != nil {
				fmt.Fprintf(&printed, "error: %v\n", err)
			}
			if at == len(lines) || lines[at] == "" {
				t.Fatalf("%s:%d: no line %s behind the commands", file, at, separator)
			}
			line = lines[at]
			fmt.Fprintln(&is, line)
		}
		blocks++
		end := len(lines)
		if n := slices.Index(lines[at:], ""); n >= 0 {
			end = at + n
		}
		want := strings.Join(append(slices.Clone(lines[at:end]), ""), "\n")
		at = end
		got := printed.String()
		is.WriteString(got)
		switch {
		case strings.Contains("\n"+got, "\n\n"):
			t.Fatalf("%s:%d: an empty line ends a block, and commands print\n%s", file, first, got)
		case !*rewrite && got != want:
			t.Errorf("%s:%d: %s: got\n%swant\n%s", file, first, lines[first-1], got, want)
		}
	}
	if blocks == 0 {
		t.Fatalf("%s has no commands", file)
	}
	if *rewrite && is.String() != was {
		if err := os.WriteFile(file, []byte(is.String()), 0o666); err != nil {
			t.Fatal(err)
		}
	}
}

// split cuts a line into words.
func split(line string) (words []string, err error) {
	for rest := strings.TrimLeft(line, " "); rest != ""; rest = strings.TrimLeft(rest, " ") {
		word, after, _ := strings.Cut(rest, " ")
		if rest[0] == '"' || rest[0] == '`' {
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, fmt.Errorf("%w: %s", err, rest)
			}
			after = rest[len(quoted):]
			word, _ = strconv.Unquote(quoted)
		}
		words, rest = append(words, word), after
	}
	return words, nil
}
