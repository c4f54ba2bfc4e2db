package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"gorgonia.org/leanattention/examples/llama"
	"gorgonia.org/leanattention/examples/opt/files"
)

// explain adds to the error of opening the value of -model what the value is, and what to do instead.
func explain(name string, err error) error {
	if name == "" {
		return err
	}
	info, e := os.Stat(name)
	switch {
	case errors.Is(e, fs.ErrNotExist) && hubName.MatchString(name):
		return fmt.Errorf("-model %s: there is no such folder here. If it is the name of a model at huggingface.co: nothing is downloaded from there. Put the files of https://huggingface.co/%s into a folder, and give that to -model", name, name)
	case e != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("-model %s: %s, and -model takes a folder that has config.json, the weights and the tokenizer%s", name, fileKind(name, info), folderOfModel(name))
	}
	if kind := otherModel(name); kind != "" {
		return fmt.Errorf("%w: %s", err, kind)
	}
	return err
}

// hubName matches names of models at huggingface.co.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// fileKind returns the kind of a file that was given in place of a folder.
func fileKind(name string, info fs.FileInfo) string {
	if !info.Mode().IsRegular() {
		return "it is neither a folder nor a regular file"
	}
	begin := make([]byte, 8)
	if f, err := os.Open(name); err == nil {
		n, _ := io.ReadFull(f, begin)
		begin = begin[:n]
		f.Close()
	}
	switch ext := strings.ToLower(filepath.Ext(name)); {
	case bytes.HasPrefix(begin, []byte("GGUF")):
		return "it is a GGUF file, which this program does not read: the model has to be in the form of Hugging Face's transformers"
	case ext == ".safetensors", ext == ".bin", ext == ".pt", ext == ".pth":
		return "it is a file of weights"
	case ext == ".json":
		return "it is a JSON file"
	}
	return "it is a file"
}

// folderOfModel returns the folder of a file, if it is the folder of a model.
func folderOfModel(name string) string {
	folder := filepath.Dir(name)
	if info, err := os.Stat(filepath.Join(folder, "config.json")); err == nil && info.Mode().IsRegular() {
		return fmt.Sprintf(": here that is -model %s", folder)
	}
	return ""
}

// otherModel describes a folder that is not one of an OPT model.
func otherModel(folder string) string {
	data, err := files.Read(filepath.Join(folder, "config.json"), 16<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return otherFolder(folder)
	}
	var config struct {
		Type string `json:"model_type"`
	}
	if err != nil || json.Unmarshal(data, &config) != nil || config.Type == "opt" || config.Type == "" {
		return ""
	}
	if _, err := llama.ReadConfig(data); err == nil {
		return "opt decodes OPT models; for this one there is the Go package gorgonia.org/leanattention/examples/llama, and no command"
	}
	return "opt decodes OPT models, such as those of https://huggingface.co/facebook/opt-125m"
}

// otherFolder describes a folder without config.json.
func otherFolder(folder string) string {
	if snapshots, _ := filepath.Glob(filepath.Join(globbed(folder), "snapshots", "*", "config.json")); len(snapshots) > 0 {
		return fmt.Sprintf("it is a folder of the hub's cache, whose model is at -model %s", filepath.Dir(snapshots[len(snapshots)-1]))
	}
	if models, _ := filepath.Glob(filepath.Join(globbed(folder), "*", "config.json")); len(models) > 0 {
		return fmt.Sprintf("there are models in it: try -model %s", filepath.Dir(models[0]))
	}
	if gguf, _ := filepath.Glob(filepath.Join(globbed(folder), "*.gguf")); len(gguf) > 0 {
		return fmt.Sprintf("it has %q: this program reads no GGUF files, the model has to be in the form of Hugging Face's transformers", filepath.Base(gguf[0]))
	}
	return ""
}

// globbed returns a path as a part of a pattern.
func globbed(path string) string {
	if filepath.Separator == '\\' { // a pattern can't escape these characters there
		return path
	}
	return regexp.MustCompile(`[*?\[\\]`).ReplaceAllString(path, `\$0`)
}
