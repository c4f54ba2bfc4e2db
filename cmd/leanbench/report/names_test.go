package report

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNames: the tables that questions show are those that measurements make: a report
// that is measured again takes the place of the one that is there.
func TestNames(t *testing.T) {
	var code strings.Builder
	for _, dir := range []string{"../cpu", "../gpu", "../e2e", "../paper"} {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasSuffix(f.Name(), ".go") && !strings.HasSuffix(f.Name(), "_test.go") {
				text, err := os.ReadFile(dir + "/" + f.Name())
				if err != nil {
					t.Fatal(err)
				}
				code.Write(text)
			}
		}
	}
	models := regexp.MustCompile(`(OPT|Llama)-\S+`) // names of which code puts in
	// What no command of leanbench writes as JSON, but tests' benchmarks and hands.
	byHand := []string{"Benchmark", "x the time without", "Ragged batches against FlashInfer", "Against FlashInfer", "All layers of a step", "Linear layers alone", "Choosing tokens", "The first token"}
	for _, q := range slices.Concat(questions, paperQuestions) {
	tables:
		for _, table := range q.tables {
			for _, prefix := range byHand {
				if strings.HasPrefix(table, prefix) {
					continue tables
				}
			}
			name := models.ReplaceAllString(table, "%v")
			if !strings.Contains(code.String(), `"`+name+`"`) {
				t.Errorf("%s: no measurement makes a table %q", q.id, name)
			}
		}
	}
}
