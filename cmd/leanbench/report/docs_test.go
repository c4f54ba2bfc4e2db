package report

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

const root = "../../.."

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func pages(t *testing.T) (names []string) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/lab/*.md", "kernels/*.md"} {
		some, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range some {
			names = append(names, strings.TrimPrefix(name, root+"/"))
		}
	}
	return names
}

// TestLinks: what pages link to is there, headings too.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s#:]*)(#[^)\s]*)?\)`)
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	links := 0
	for _, page := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			links++
			target := page
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(page), m[1])
				if _, err := os.Stat(filepath.Join(root, target)); err != nil {
					t.Errorf("%s: there is no %s", page, m[1])
					continue
				}
			}
			if m[2] == "" {
				continue
			}
			found := false
			for _, h := range heading.FindAllStringSubmatch(read(t, target), -1) {
				found = found || "#"+anchor(h[1]) == m[2]
			}
			if !found {
				t.Errorf("%s: %s has no heading %s", page, target, m[2])
			}
		}
	}
	if links < 100 {
		t.Errorf("only %d links were found", links)
	}
}

// TestDesign: the map is short, and the files that it names are there.
func TestDesign(t *testing.T) {
	text := read(t, "docs/design.md")
	if len(text) > 16<<10 {
		t.Errorf("docs/design.md has %d bytes, and may have %d", len(text), 16<<10)
	}
	files := 0
	dir := ""
	for _, m := range regexp.MustCompile("`([a-z_A-Z0-9./*]+(?:\\.(?:go|s|cu|cuh|md)|/))`").FindAllStringSubmatch(text, -1) {
		files++
		name := m[1]
		if i := strings.LastIndex(name, "/"); i >= 0 {
			dir = name[:i+1]
		}
		// A bare name is beside the one before it, or in the root.
		found := false
		for _, try := range []string{name, dir + name} {
			some, _ := filepath.Glob(filepath.Join(root, try))
			found = found || len(some) > 0
		}
		if !found {
			t.Errorf("docs/design.md names %s, which is not there", name)
		}
	}
	if files < 60 {
		t.Errorf("only %d names were found", files)
	}
}

// TestREADME: the first page is short, and has the two commands that CI runs.
func TestREADME(t *testing.T) {
	text := read(t, "README.md")
	if len(text) > 7<<10 {
		t.Errorf("README.md has %d bytes, and may have %d", len(text), 7<<10)
	}
	for _, line := range []string{"go test ./...", `go run ./examples/opt -prompt "Once upon a time"`} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("README.md has no line %q", line)
		}
	}
}

// TestLab: the pages of the lab keep conclusions, not a diary. Each ends with a table of what did not help: an idea, its
// figure and a verdict. All of them together are short enough to be read.
func TestLab(t *testing.T) {
	const (
		heading = "\n## What did not help\n\n| idea | figure | verdict |\n|---|---|---|\n"
		most    = 15000 // words of all pages
	)
	dated := regexp.MustCompile(`(?m)^#+ .*\d{4}-\d{2}-\d{2}`)
	rows, words := 0, 0
	for _, page := range pages(t) {
		if !strings.HasPrefix(page, "docs/lab/") {
			continue
		}
		text := read(t, page)
		words += len(strings.Fields(text))
		if h := dated.FindString(text); h != "" {
			t.Errorf("%s: %q has a date: a section is a topic", page, h)
		}
		_, table, ok := strings.Cut(text, heading)
		if !ok {
			t.Errorf("%s lacks%s", page, heading)
			continue
		}
		for line := range strings.Lines(table) {
			rows++
			cells := strings.Split(strings.TrimSuffix(line, "\n"), "|")
			if len(cells) != 5 || cells[0] != "" || cells[4] != "" {
				t.Errorf("%s: %q is no row of three cells", page, line)
				continue
			}
			if strings.TrimSpace(cells[1]) == "" || strings.TrimSpace(cells[3]) == "" {
				t.Errorf("%s: %q lacks an idea or a verdict", page, line)
			}
			if !strings.ContainsAny(cells[2], "0123456789") {
				t.Errorf("%s: %q has no figure", page, line)
			}
		}
	}
	if rows < 50 {
		t.Errorf("only %d ideas were found", rows)
	}
	if words > most {
		t.Errorf("the pages of docs/lab have %d words, and may have %d", words, most)
	}
}

// TestNumbers: what pages for users say of a measurement is a figure of a JSON that the paragraph, or that before its table,
// links to. The tables of docs/benchmarks.md and of the README are written from JSON, and docs/paper.md has a test of its own.
func TestNumbers(t *testing.T) {
	measured := regexp.MustCompile(`\d (us|ms|GB/s|TFLOP/s|tokens/s)\b|\d%|\d times (as fast|with|behind)`)
	number := regexp.MustCompile(`(?:^|[ (|])(\d+(?:\.\d+)?)(%| (?:us|ms|GB/s|TFLOP/s|tokens/s|times)\b|[ ,.;)]|$)`)
	span := regexp.MustCompile(`(\d) to (\d+(?:\.\d+)?)(%| (?:us|ms|GB/s|TFLOP/s|tokens/s|times)\b)`) // its first number has the unit, too
	link := regexp.MustCompile(`\]\(([^)]*\.json)\)`)
	numbers := 0
	for _, page := range pages(t) {
		if strings.HasPrefix(page, "docs/lab/") || strings.HasPrefix(page, "kernels/") || page == "docs/benchmarks.md" || page == "docs/paper.md" || page == "CHANGELOG.md" || page == "CONTRIBUTING.md" {
			continue
		}
		text := read(t, page)
		if before, rest, ok := strings.Cut(text, begin); ok {
			_, after, _ := strings.Cut(rest, end)
			text = before + after
		}
		text = regexp.MustCompile("(?s)```.*?```").ReplaceAllString(text, "")
		var names []string
		for _, block := range strings.Split(text, "\n\n") {
			if !strings.HasPrefix(block, "|") {
				names = nil
			}
			for _, m := range link.FindAllStringSubmatch(block, -1) {
				names = append(names, filepath.Join(root, filepath.Dir(page), m[1]))
			}
			if !measured.MatchString(block) {
				continue
			}
			var figures []measure.Figure
			for _, name := range names {
				r, err := measure.Load(name)
				if err != nil {
					t.Fatal(err)
				}
				figures = append(figures, r.Figures...)
			}
			for _, m := range number.FindAllStringSubmatch(span.ReplaceAllString(block, "$1$3 to $2$3"), -1) {
				_, decimals, _ := strings.Cut(m[1], ".")
				if decimals == "" && !measured.MatchString(m[1]+m[2]) {
					continue // a count, or a size
				}
				numbers++
				scale := 1.0
				if m[2] == "%" {
					scale = 100
				}
				if !slices.ContainsFunc(figures, func(f measure.Figure) bool { return fmt.Sprintf("%.*f", len(decimals), scale*f.Value) == m[1] }) {
					t.Errorf("%s: %s is no figure of the %d JSON that it links to: %s", page, m[1], len(names), block)
				}
			}
		}
	}
	if numbers < 10 {
		t.Errorf("only %d numbers were found", numbers)
	}
}

// TestPaperNumbers: each number that docs/paper.md has of a measurement is a figure of a committed report or its bar, and each
// that it has of the paper one of those that the paper's text gives.
func TestPaperNumbers(t *testing.T) {
	all, err := load(committed(t))
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, run := range all.papers {
		for _, f := range run.order[0].Figures {
			for _, q := range paperQuestions {
				for _, c := range q.columns {
					if c.metric == f.Metric {
						known[format(c.form, f)] = true
					}
				}
			}
			known[fmt.Sprintf("%.2f", f.Value)], known[fmt.Sprintf("%.0f", f.Value)], known[fmt.Sprint(f.Value)] = true, true, true
			if f.Bar != nil && f.Bar.Least != nil {
				known[fmt.Sprintf("%.2f", *f.Bar.Least)], known[fmt.Sprint(*f.Bar.Least)] = true, true
			}
		}
	}
	text := read(t, "docs/paper.md")
	text, _, _ = strings.Cut(text, "\n## Runs\n") // machines and versions
	numbers := 0
	check := func(number, line string) {
		if numbers++; !known[strings.Trim(number, "*")] {
			t.Errorf("%s is in no committed JSON: %s", number, line)
		}
	}
	number := regexp.MustCompile(`^\**\d+(\.\d+)?%?\**$`)
	words := regexp.MustCompile(`(?:^|[ (])(\d+\.\d+)(?:[ ,.;)]|$)`)
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "|") {
			for _, cell := range strings.Split(line, "|")[2:] { // the first one is a shape
				for _, bound := range strings.Split(strings.TrimSpace(cell), "–") { // from the least to the largest
					if number.MatchString(bound) {
						check(bound, line)
					}
				}
			}
			continue
		}
		if strings.Contains(line, "arXiv:2405.10480") || strings.HasPrefix(line, "- \"Fixed split\"") || strings.HasPrefix(line, "Energy of the whole GPU") {
			continue // no figure of a measurement: versions and how it is done
		}
		for _, m := range words.FindAllStringSubmatch(line, -1) {
			check(m[1], line)
		}
	}
	if numbers < 400 {
		t.Errorf("only %d numbers were found", numbers)
	}
}
