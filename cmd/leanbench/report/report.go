// Package report writes docs/benchmarks.md, its pictures and the README's table of speed from measurements in
// JSON.
package report

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands lists the commands of this package.
var Commands = []command.Command{
	{Name: "report", Summary: "write docs/benchmarks.md of docs/benchmarks/*.json", Setup: writeReport, Args: true},
	{Name: "threads", Summary: "draw what e2e -threads and cpu -prompts -threads measured: the speed over the number of threads", Setup: drawThreads},
	{Name: "gobench", Summary: "turn what go test -bench printed into JSON", Setup: convertBench},
}

// writeReport writes the page and its pictures, or compares them with the existing files.
func writeReport(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	check := flags.Bool("check", false, "write nothing: fail if a file is not what the JSON gives")
	return func(stdout, stderr io.Writer) error {
		if flags.NArg() == 0 {
			return errors.New("name the JSON: docs/benchmarks/*.json")
		}
		files, err := Files(flags.Args())
		if err != nil {
			return err
		}
		var stale []string
		for _, name := range slices.Sorted(maps.Keys(files)) {
			there, err := os.ReadFile(name)
			if err == nil && bytes.Equal(there, files[name]) {
				continue
			}
			if *check {
				stale = append(stale, name)
			} else if err := os.WriteFile(name, files[name], 0o666); err != nil {
				return err
			}
		}
		if len(stale) > 0 {
			return fmt.Errorf("%s: not what the JSON gives; run leanbench report without -check", strings.Join(stale, ", "))
		}
		return nil
	}
}

// Files returns all files that the reports produce, keyed by name: FOLDER.md for reports in FOLDER, a picture
// in FOLDER for each question, and the README two folders up, if it exists.
func Files(names []string) (map[string][]byte, error) {
	t, err := load(names)
	if err != nil {
		return nil, err
	}
	folder := filepath.Dir(names[0])
	files := make(map[string][]byte)
	for _, q := range questions {
		svg, err := t.draw(q)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", q.id, err)
		}
		files[filepath.Join(folder, q.id+".svg")] = svg
	}
	page, err := t.page(filepath.Base(folder))
	if err != nil {
		return nil, err
	}
	files[folder+".md"] = page
	if len(t.papers) > 0 {
		if err := paperFiles(filepath.Join(filepath.Dir(folder), "paper.md"), folder, t.papers, files); err != nil {
			return nil, err
		}
	}
	name, readme, err := t.readme(folder)
	if name != "" {
		files[name] = readme
	}
	return files, err
}

// tables holds the figures of all reports. Each report on the paper's figures has its own tables in papers,
// because several machines have tables of the same names.
type tables struct {
	papers  []*tables                   // one report each
	figures map[string][]measure.Figure // keyed by table name
	reports map[string]*measure.Report  // report of each table, keyed by table name
	order   []*measure.Report
	names   map[*measure.Report]string // file names without .json
}

func newTables() *tables {
	return &tables{figures: make(map[string][]measure.Figure), reports: make(map[string]*measure.Report), names: make(map[*measure.Report]string)}
}

// add adds the figures of a report.
func (t *tables) add(name string, r *measure.Report) error {
	t.order = append(t.order, r)
	t.names[r] = strings.TrimSuffix(filepath.Base(name), ".json")
	type key struct {
		table, is, who string
		metric         measure.Metric
	}
	seen := make(map[key]bool)
	for _, f := range r.Figures {
		if there := t.reports[f.Table]; there != nil && there != r {
			return fmt.Errorf("%s: the table %q is in another report, too", name, f.Table)
		}
		t.reports[f.Table] = r
		k := key{f.Table, f.Case, f.Contender, f.Metric}
		if seen[k] {
			return fmt.Errorf("%s: %+v is there twice", name, k)
		}
		seen[k] = true
		if f.Bar != nil && !consistent(f) {
			return fmt.Errorf("%s: %+v: %v does not fit its bar %+v", name, k, f.Value, *f.Bar)
		}
		t.figures[f.Table] = append(t.figures[f.Table], f)
	}
	return nil
}

func load(names []string) (*tables, error) {
	t := newTables()
	for _, name := range names {
		r, err := measure.Load(name)
		if err != nil {
			return nil, err
		}
		to := t
		if ofPaper(r) {
			to = newTables()
			t.papers = append(t.papers, to)
		}
		if err := to.add(name, r); err != nil {
			return nil, err
		}
	}
	used := make(map[string]bool)
	for _, q := range questions {
		for _, table := range append(slices.Clone(q.tables), q.points) {
			used[table] = true
			if table != "" && t.figures[table] == nil {
				return nil, fmt.Errorf("there are no figures of %q, which %s needs", table, q.id)
			}
		}
	}
	for table := range t.figures {
		if !used[table] {
			return nil, fmt.Errorf("no question shows the table %q", table)
		}
	}
	return t, nil
}

// consistent reports whether a figure's verdict agrees with its value and its limits. A transcribed value is
// rounded, so a value within 0.6% of a limit is always consistent.
func consistent(f measure.Figure) bool {
	met := f.Bar.Judge(f.Value).Met
	near := false
	for _, limit := range []*float64{f.Bar.Least, f.Bar.Most} {
		near = near || limit != nil && f.Value > *limit*0.994 && f.Value < *limit*1.006
	}
	return met == f.Bar.Met || near
}

// find returns a figure, or nil if there is none.
func (t *tables) find(table, is, who string, m measure.Metric) *measure.Figure {
	for i, f := range t.figures[table] {
		if f.Case == is && f.Contender == who && f.Metric == m {
			return &t.figures[table][i]
		}
	}
	return nil
}
