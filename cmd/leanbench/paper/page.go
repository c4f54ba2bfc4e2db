package paper

import (
	"maps"
	"os"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/report"
)

const tableAll = report.PaperAll

// writePage writes a page of what was measured, and its pictures beside it.
func writePage(name string, r *measure.Report) error {
	files, err := report.PaperPage(name, r)
	if err != nil {
		return err
	}
	for _, file := range slices.Sorted(maps.Keys(files)) {
		if err := os.WriteFile(file, files[file], 0o666); err != nil {
			return err
		}
	}
	return nil
}
